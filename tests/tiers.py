"""Small tiered stores for tests: groups, training steps, and what a folder holds."""

import hashlib
from pathlib import Path

import torch

from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup, record_fields
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB

ADAM = AdamSpec(lr=0.1)


def uniform_table(name: str = "t", num_rows: int = 1000, dim: int = 8, table_id: int = 0) -> TableSpec:
    """A table whose rows start with values other than zero."""
    return TableSpec(name, num_rows, dim, table_id, seed=7, init="uniform", init_a=-0.5, init_b=0.5)


def config(folder: Path, dram_bytes: int | str = 64 * KIB, **options: object) -> TierConfig:
    """One path below `folder`, small segments, few reads in flight."""
    values: dict[str, object] = {"segment_bytes": 256 * KIB, "queue_depth": 16, **options}
    return TierConfig(dram_bytes, [folder / "ssd"], **values)  # type: ignore[arg-type]  # tests name options as they like


def store_paths(folder: Path) -> list[str]:
    """Where `config` puts the store of the only rank."""
    return [str(folder / "ssd" / "rank-0")]


def open_tiered(
    folder: Path, tables: list[TableSpec], optimizer: OptimizerSpec = ADAM, dram_bytes: int | str = 64 * KIB, **options: object
) -> TieredTables:
    """Opens a store; `restore` may be among the options."""
    restore = options.pop("restore", None)
    assert restore is None or isinstance(restore, str)
    return TieredTables.open(tables, optimizer, config(folder, dram_bytes, **options), restore=restore)


def train(group: RowGroup, table: int, rows: torch.Tensor, step: int = 1, lr: float = 0.1) -> torch.Tensor:
    """One fused step over single-valued bags of one table; returns what was looked up."""
    group.set_step(lr, step)
    out = group.pooled(rows, torch.arange(rows.numel() + 1), [table])
    out.backward(torch.full_like(out, 0.5) + out.detach())
    return out.detach()


def state_of(group: RowGroup, optimizer: OptimizerSpec = ADAM) -> dict[str, torch.Tensor]:
    """Every field of every row."""
    return {
        f"{spec.name}.{field.name}": group.read(table, torch.arange(spec.num_rows), field.name)
        for table, spec in enumerate(group.tables)
        for field in record_fields(spec, optimizer)
    }


def assert_same_state(actual: RowGroup, expected: RowGroup, optimizer: OptimizerSpec = ADAM) -> None:
    """Compares bit for bit."""
    left, right = state_of(actual, optimizer), state_of(expected, optimizer)
    for name, values in right.items():
        assert torch.equal(left[name], values), (
            f"{name} differs in rows {(left[name] != values).any(dim=1).nonzero().flatten()[:5].tolist()}"
        )


def file_hashes(folder: Path) -> dict[str, str]:
    """Name and content of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
