"""Replicas for tests of merge rounds: groups of rows, steps on chosen rows, what rows hold."""

from collections.abc import Mapping, Sequence

import torch

from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.row_group import RowGroup, record_fields
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec

# Two tables whose rows differ in width and number; the second is long-tailed.
TABLES = (
    TableSpec("small", 40, 8, 0, seed=7, init="uniform", init_a=-0.5, init_b=0.5),
    TableSpec("large", 3000, 4, 1, seed=7, init="uniform", init_a=-0.5, init_b=0.5),
)
ADAM = AdamSpec(lr=0.05, bias_correction="row", touches="count")


def dram_group(optimizer: OptimizerSpec = ADAM, tables: Sequence[TableSpec] = TABLES) -> RowGroup:
    """Rows in DRAM; equal on all replicas."""
    return RowGroup.in_dram(tables, optimizer)


def touch(group: RowGroup, gradients: Mapping[int, tuple[Sequence[int], torch.Tensor]], step: int = 1, lr: float = 0.05) -> None:
    """One step on chosen rows.

    Args:
        group: the rows.
        gradients: by table, rows (ascending) and their gradients `[n, dim]`.
        step: the optimizer's step, from 1.
        lr: learning rate.
    """
    rows, grads, bounds = [], [], [0]
    for table, dim in enumerate(group.table_dims):
        own, grad = gradients.get(table, ([], torch.empty(0, dim)))
        rows.append(torch.tensor(own, dtype=torch.int64))
        grads.append(grad.flatten())
        bounds.append(bounds[-1] + len(own))
    group.set_step(lr, step)
    group.apply(RowGradients(torch.cat(rows), torch.tensor(bounds), torch.ones(bounds[-1], dtype=torch.int32), torch.cat(grads)))


def random_steps(group: RowGroup, replica: int, first_step: int, num_steps: int, num_ids: int = 200) -> None:
    """Steps on random rows, a function of replica and step."""
    for step in range(first_step, first_step + num_steps):
        noise = torch.Generator().manual_seed(1000 * replica + step)
        gradients = {}
        for index, table in enumerate(group.tables):
            ids = (torch.rand(num_ids, generator=noise) ** 2 * table.num_rows).long()  # low ids are hot
            rows = torch.unique(ids)
            gradients[index] = (rows.tolist(), torch.randn(rows.numel(), table.dim, generator=noise))
        touch(group, gradients, step)


def rows_of(group: RowGroup, with_touches: bool = False) -> dict[str, torch.Tensor]:
    """Every field of every row, counters of touches only on demand."""
    return {
        f"{table.name}.{field.name}": group.read(index, torch.arange(table.num_rows), field.name)
        for index, table in enumerate(group.tables)
        for field in record_fields(table, group.optimizer)
        if with_touches or not field.name.startswith("touches")
    }


def assert_same_rows(actual: RowGroup, expected: RowGroup) -> None:
    """Compares bit for bit."""
    left, right = rows_of(actual), rows_of(expected)
    for name, values in right.items():
        rows = (left[name] != values).any(dim=1).nonzero().flatten()
        assert not rows.numel(), f"{name} differs in {rows.numel()} rows, first {rows[:5].tolist()}"
