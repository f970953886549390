"""Rows of a row group as a tensor: what `state_dict` shows of a table that has no tensor of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import FieldType

_DTYPES: dict[FieldType, torch.dtype] = {"f32": torch.float32, "i32": torch.int32}
CHUNK_BYTES = 16 << 20  # values held at once while rows are overwritten

_aten = torch.ops.aten


@dataclass(frozen=True)
class RowBlock:
    """A rectangle of one field of a table of a row group.

    Attributes:
        group: the group, which it keeps alive.
        table: position of the table in the group.
        field: name of the record field.
        first_row: row id of the first row.
        num_rows: rows; may be 0.
        first_column: first element of the field.
        num_columns: elements of each row.
    """

    group: RowGroup
    table: int
    field: str
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return _DTYPES[self.group.field(self.table, self.field).dtype]

    def read(self) -> torch.Tensor:
        """Returns a copy, `[num_rows, num_columns]`; rows that were never updated show their initial values and stay so."""
        rows = torch.arange(self.first_row, self.first_row + self.num_rows)
        return self._whole_fields(rows)[:, self.first_column : self.first_column + self.num_columns].contiguous()

    def write(self, values: torch.Tensor) -> None:
        """Overwrites the rows that differ from `values` (`[num_rows, num_columns]`), bit by bit.

        The others are left alone, so that loading the state of a table of which little was trained materialises little.
        """
        step = max(1, CHUNK_BYTES // (4 * max(self.num_columns, 1)))
        for begin in range(0, self.num_rows, step):
            end = min(begin + step, self.num_rows)
            self._write_chunk(begin, materialise(values[begin:end]).to(self.dtype).contiguous())

    def _write_chunk(self, begin: int, values: torch.Tensor) -> None:
        rows = torch.arange(self.first_row + begin, self.first_row + begin + values.shape[0])
        whole = self._whole_fields(rows)
        columns = slice(self.first_column, self.first_column + self.num_columns)
        differs = (whole[:, columns].contiguous().view(torch.int32) != values.view(torch.int32)).any(dim=1)
        if bool(differs.any()):
            whole[:, columns] = values
            self.group.write_ascending(self.table, rows[differs], whole[differs], self.field)

    def _whole_fields(self, rows: torch.Tensor) -> torch.Tensor:
        """Reads all columns of the field of `rows`, which ascend."""
        return self.group.read_ascending(self.table, rows, self.field)


class RowsTensor(torch.Tensor):
    """A float32 or int32 matrix on the CPU whose values are those of a `RowBlock` at the time they are looked at.

    It takes no memory. Slices, `detach` and `view_as` stay connected to the rows; writing into it (`copy_`, `zero_`, ...)
    writes the rows, in chunks; every other operation reads the values first and then works on the copy. This is what
    upstream's state is too: views of the tables. To keep the values of now, `clone` it.
    """

    block: RowBlock

    @staticmethod
    def __new__(cls, block: RowBlock) -> "RowsTensor":
        """Makes a tensor without storage."""
        size = (block.num_rows, block.num_columns)
        tensor: RowsTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=(max(block.num_columns, 1), 1), dtype=block.dtype, device=torch.device("cpu")
        )
        tensor.block = block
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch types the method of its C++ base wrongly
        """Names the rows instead of reading them."""
        del tensor_contents
        block = self.block
        name = block.group.tables[block.table].name
        rows = f"rows {block.first_row}..{block.first_row + block.num_rows}"
        return f"RowsTensor({name}.{block.field}, {rows}, {block.num_columns} columns, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns the values of now, in a tensor of its own."""
        values = memo.setdefault(id(self), self.block.read())
        assert isinstance(values, torch.Tensor)
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        return self.block.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the values of now as an array of its own."""
        return self.block.read().numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base class declares the bound form
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers what needs no values; reads or writes the rows for the rest."""
        del types
        kwargs = kwargs or {}
        if func in _CONNECTED and isinstance(args[0], RowsTensor):
            connected = _CONNECTED[func](*args, **kwargs)
            if connected is not None:
                return RowsTensor(connected)
        if func is _aten.is_pinned.default:
            return False
        if func is _aten.copy_.default and isinstance(args[0], RowsTensor):
            args[0]._take_over(args[1])
            return args[0]
        return _on_values(func, args, kwargs)

    def _take_over(self, source: torch.Tensor) -> None:
        """Copies `source` into the rows; copying rows onto themselves does nothing."""
        if isinstance(source, RowsTensor) and source.block == self.block:
            return
        self.block.write(source if source.shape == self.shape else source.expand(self.shape))


def materialise(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a `RowsTensor` as a plain tensor, and any other tensor as it is."""
    return tensor.block.read() if isinstance(tensor, RowsTensor) else tensor


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the values; what it wrote into its arguments is written into the rows."""
    values: dict[int, torch.Tensor] = {}

    def value_of(tensor: RowsTensor) -> torch.Tensor:
        return values.setdefault(id(tensor), tensor.block.read())

    result = func(*tree_map_only(RowsTensor, value_of, args), **tree_map_only(RowsTensor, value_of, kwargs))
    written: dict[int, RowsTensor] = {}
    for index, argument in enumerate(func._schema.arguments):
        tensor = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(tensor, RowsTensor):
            tensor.block.write(values[id(tensor)])
            written[id(values[id(tensor)])] = tensor
    return tree_map_only(torch.Tensor, lambda tensor: written.get(id(tensor), tensor), result)


def _same(tensor: RowsTensor, *_args: Any, **_options: Any) -> RowBlock:
    return tensor.block


def _same_if_same_size(tensor: RowsTensor, size: Any, *_args: Any) -> RowBlock | None:
    is_same = len(size) == 2 and all(wanted in (-1, have) for wanted, have in zip(size, tensor.shape, strict=True))
    return tensor.block if is_same else None


def _slice(tensor: RowsTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> RowBlock | None:
    if step != 1:
        return None
    begin, end, _ = slice(start, end).indices(tensor.shape[dim])
    count = max(end - begin, 0)
    block = tensor.block
    if dim in (0, -2):
        return replace(block, first_row=block.first_row + begin, num_rows=count)
    return replace(block, first_column=block.first_column + begin, num_columns=count)


_CONNECTED: dict[Any, Callable[..., RowBlock | None]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _same_if_same_size,
    _aten.slice.Tensor: _slice,
}
