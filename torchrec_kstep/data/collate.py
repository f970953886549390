"""Puts columns of numbers together into a `Batch`, and refuses columns that do not fit together."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import DataError
from torchrec_kstep.types import Batch, FeatureSchema


@dataclass(frozen=True)
class Bags:
    """The bags of one feature: `ids[sum(lengths[:i]) : sum(lengths[:i + 1])]` is the bag of row i.

    Attributes:
        ids: `[num_ids]` row ids of any integer dtype.
        lengths: `[num_rows]` ids per row of any integer dtype, or None where every row has exactly one.
    """

    ids: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.integer] | None = None

    @classmethod
    def join(cls, pieces: Sequence["Bags"]) -> "Bags":
        """Lays bags with lengths end to end; there may be none."""
        if len(pieces) == 1:
            return pieces[0]
        nothing = np.empty(0, dtype=np.int32)
        lengths = [nothing, *(piece.lengths for piece in pieces if piece.lengths is not None)]
        return cls(np.concatenate([nothing, *(piece.ids for piece in pieces)]), np.concatenate(lengths))


def ids_dtype(schema: FeatureSchema) -> type[np.int32 | np.int64]:
    """Returns the dtype of the ids of all batches: int32 where every row of every table fits, half the bytes to copy and to send."""
    largest = max((feature.num_rows for feature in schema.sparse), default=0)
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def make_sparse(names: Sequence[str], ids: torch.Tensor, lengths: torch.Tensor) -> KeyedJaggedTensor:
    """Makes a `KeyedJaggedTensor`, checking what TorchRec finds out only deep inside a model.

    Args:
        names: feature names, in the order of `ids`.
        ids: `[num_ids]` row ids, int32 or int64, feature by feature; kept as int64.
        lengths: `[len(names) * B]` integers, the bag sizes of every row of the first feature, then of the second, and so on.

    Raises:
        DataError: the lengths do not divide by the features, do not add up to the ids, or an id or length has a wrong dtype.
    """
    duplicates = sorted({name for name in names if list(names).count(name) > 1})
    if duplicates:
        raise DataError(f"feature names {duplicates} are used twice: give every feature a name of its own")
    if ids.dtype not in (torch.int32, torch.int64) or lengths.dtype not in (torch.int32, torch.int64):
        raise DataError(f"expected int32 or int64 ids and lengths, got ids of {ids.dtype} and lengths of {lengths.dtype}")
    if not names or lengths.numel() % len(names):
        batch_size = lengths.numel() // max(1, len(names))
        raise DataError(
            f"{lengths.numel()} lengths cannot be shared by {len(names)} features: expected {len(names)} x batch size, "
            f"so {len(names) * batch_size} for a batch size of {batch_size} or {len(names) * (batch_size + 1)} for {batch_size + 1}; "
            "give every feature one length per row, 0 for an empty bag"
        )
    batch_size = lengths.numel() // len(names)
    if lengths.numel() and int(lengths.min()) < 0:
        raise DataError(f"a bag length is {int(lengths.min())}: lengths must be 0 or more ids")
    if int(lengths.sum()) != ids.numel():
        per_feature = dict(zip(names, lengths.view(len(names), batch_size).sum(dim=1).tolist(), strict=True))
        raise DataError(f"lengths add up to {sum(per_feature.values())} ids but there are {ids.numel()}; per feature {per_feature}")
    return KeyedJaggedTensor(keys=list(names), values=ids.to(torch.int64), lengths=lengths.to(torch.int32), stride=batch_size)


def make_batch(
    schema: FeatureSchema,
    dense: npt.NDArray[np.float32],
    bags: Mapping[str, Bags],
    label: npt.NDArray[np.float32],
    num_padded_rows: int | None = None,
    num_global_rows: int | None = None,
) -> Batch:
    """Makes a batch of n rows out of numpy columns, checked against the schema.

    Args:
        schema: names and order of the columns, rows of the tables.
        dense: `[n, num_dense]` float32.
        bags: the bags of every sparse feature, by name.
        label: `[n]` float32, 0 or 1.
        num_padded_rows: rows after padding; None = n.
        num_global_rows: rows of the global batch; None = n.

    Returns:
        A batch on the CPU that shares no memory with the arguments; ids are of `ids_dtype`.

    Raises:
        DataError: a column is missing or of another length, an id is outside its table, a number is not finite.
    """
    num_rows = len(label)
    if dense.shape != (num_rows, schema.num_dense):
        raise DataError(f"dense columns have shape {dense.shape}, expected ({num_rows}, {schema.num_dense}): rows x dense columns")
    if set(bags) != set(schema.sparse_names):
        missing, unknown = sorted(set(schema.sparse_names) - set(bags)), sorted(set(bags) - set(schema.sparse_names))
        raise DataError(f"expected bags of {', '.join(schema.sparse_names)}; missing {missing}, unknown {unknown}")
    if not np.isfinite(dense).all() or not np.isfinite(label).all():
        raise DataError("a dense value or label is NaN or infinite: clean the rows before batching them")
    for feature in schema.sparse:
        _check_bags(feature.name, bags[feature.name], num_rows, feature.num_rows)
    in_order = [bags[name] for name in schema.sparse_names]
    dense, label = np.array(dense, dtype=np.float32), np.array(label, dtype=np.float32)
    return pad_batch(schema, dense, in_order, label, num_padded_rows or num_rows, num_global_rows or num_rows)


def pad_batch(
    schema: FeatureSchema,
    dense: npt.NDArray[np.float32],
    bags: Sequence[Bags],
    label: npt.NDArray[np.float32],
    num_padded_rows: int,
    num_global_rows: int,
) -> Batch:
    """Makes a batch out of columns that are known to be right: the fast path of the readers.

    Arguments as in `make_batch`; the batch takes `dense` and `label` over where they need no padding.
    """
    # In numpy throughout: torch's operators would start the threads of its own pool for arrays of this size, and so take the
    # cores from the training step that this runs beside.
    num_rows = len(label)
    lengths = np.zeros((len(bags), num_padded_rows), dtype=np.int32)
    ids = np.empty(sum(len(bag.ids) for bag in bags), dtype=ids_dtype(schema))
    end = 0
    for index, bag in enumerate(bags):
        lengths[index, :num_rows] = 1 if bag.lengths is None else bag.lengths
        begin, end = end, end + len(bag.ids)
        ids[begin:end] = bag.ids
    weight = np.zeros(num_padded_rows, dtype=np.float32)
    weight[:num_rows] = 1
    values, keys = torch.from_numpy(ids), list(schema.sparse_names)
    return Batch(
        dense=torch.from_numpy(_pad(dense, num_padded_rows)),
        sparse=KeyedJaggedTensor(keys=keys, values=values, lengths=torch.from_numpy(lengths).view(-1), stride=num_padded_rows),
        label=torch.from_numpy(_pad(label, num_padded_rows)),
        weight=torch.from_numpy(weight),
        num_global_rows=num_global_rows,
    )


def make_single_valued_batch(
    schema: FeatureSchema,
    dense: npt.NDArray[np.float32],
    ids: npt.NDArray[np.integer],
    label: npt.NDArray[np.float32],
    num_padded_rows: int,
    num_global_rows: int,
) -> Batch:
    """Makes a batch whose rows have one id for every feature, without copying the ids.

    Bag lengths, which all such batches have in common, are one tensor for all of them: nobody may change them in place.

    Args:
        schema: names and order of the columns.
        dense: `[n, num_dense]` float32; taken over where it needs no padding, like `label`.
        ids: `[num_features, n]` of `ids_dtype`, contiguous; taken over.
        label: `[n]` float32.
        num_padded_rows: rows after padding.
        num_global_rows: rows of the global batch.
    """
    num_features, num_rows = ids.shape
    weight = np.zeros(num_padded_rows, dtype=np.float32)
    weight[:num_rows] = 1
    return Batch(
        dense=torch.from_numpy(_pad(dense, num_padded_rows)),
        sparse=KeyedJaggedTensor(
            keys=list(schema.sparse_names),
            values=torch.from_numpy(ids.reshape(-1)),
            lengths=_one_id_a_row(num_features, num_rows, num_padded_rows),
            stride=num_padded_rows,
            length_per_key=[num_rows] * num_features,
        ),
        label=torch.from_numpy(_pad(label, num_padded_rows)),
        weight=torch.from_numpy(weight),
        num_global_rows=num_global_rows,
    )


@functools.lru_cache(maxsize=4)  # a stream has one or two sizes of batches, and two streams may be open
def _one_id_a_row(num_features: int, num_rows: int, num_padded_rows: int) -> torch.Tensor:
    lengths = np.zeros((num_features, num_padded_rows), dtype=np.int32)
    lengths[:, :num_rows] = 1
    return torch.from_numpy(lengths).view(-1)


def _pad(rows: npt.NDArray[np.float32], num_padded_rows: int) -> npt.NDArray[np.float32]:
    if len(rows) == num_padded_rows:
        return rows
    padded = np.zeros((num_padded_rows, *rows.shape[1:]), dtype=np.float32)
    padded[: len(rows)] = rows
    return padded


def _check_bags(name: str, bags: Bags, num_rows: int, num_table_rows: int) -> None:
    num_lengths = len(bags.ids) if bags.lengths is None else len(bags.lengths)
    if num_lengths != num_rows:
        raise DataError(f"feature {name} has bags for {num_lengths} rows, the label has {num_rows}: expected a bag per row, maybe empty")
    if bags.lengths is not None and (int(bags.lengths.sum()) != len(bags.ids) or (num_rows and int(bags.lengths.min()) < 0)):
        raise DataError(f"feature {name}: lengths add up to {int(bags.lengths.sum())} ids but there are {len(bags.ids)}")
    if len(bags.ids) and (int(bags.ids.min()) < 0 or int(bags.ids.max()) >= num_table_rows):
        raise DataError(
            f"feature {name} has ids from {int(bags.ids.min())} to {int(bags.ids.max())}, its table has {num_table_rows} rows: "
            "ids must be at least 0 and smaller than the number of rows"
        )
