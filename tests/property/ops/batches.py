"""Batches and groups for the tests of the embedding ops: small, and full of the shapes that go wrong."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.optim_spec import AdamSpec, CowClip, OptimizerSpec, RowwiseAdagradSpec, SgdSpec

# Around every boundary of the kernels: no full vector, 8, 16 lanes, the dims with a copy of their own, the largest.
DIMS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 257, 1000, 1280, 2048)
MAX_FLOATS = 40_000  # of one table: the reference computes all of them


@dataclass
class BagBatch:
    """Ids of one batch with everything a lookup needs beside the group."""

    tables: list[TableSpec]
    table_of_feature: list[int]
    batch_size: int
    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    @property
    def table_dims(self) -> list[int]:
        return [table.dim for table in self.tables]

    @property
    def columns(self) -> int:
        return sum(self.tables[table].dim for table in self.table_of_feature)


@st.composite
def tables(draw: st.DrawFn, max_tables: int = 3) -> list[TableSpec]:
    dims = draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=max_tables))
    return [
        TableSpec(
            name=f"t{index}",
            num_rows=min(draw(st.sampled_from((1, 2, 10, 300, 5000))), MAX_FLOATS // dim),
            dim=dim,
            table_id=index + 3,
            seed=draw(st.integers(0, 2**63 - 1)),
            init="uniform",
            init_a=-0.5,
            init_b=0.5,
        )
        for index, dim in enumerate(dims)
    ]


@st.composite
def batches(draw: st.DrawFn, group: list[TableSpec], weighted: bool | None = None, bad_ids: bool = False) -> BagBatch:
    table_of_feature = draw(st.lists(st.integers(0, len(group) - 1), min_size=1, max_size=4))
    batch_size = draw(st.sampled_from((1, 1, 2, 3, 8, 70)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    max_bag = draw(st.sampled_from((0, 1, 1, 3, 9)))
    is_exact = draw(st.booleans())  # every bag of the same size, as in single-valued columns
    num_bags = len(table_of_feature) * batch_size
    lengths = torch.full((num_bags,), max_bag) if is_exact else torch.randint(0, max_bag + 1, (num_bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts = []
    for feature, table in enumerate(table_of_feature):
        count = int(offsets[(feature + 1) * batch_size] - offsets[feature * batch_size])
        num_rows = group[table].num_rows
        used = draw(st.sampled_from((1, 3, num_rows)))  # few different rows: many duplicates
        ids = torch.randint(0, min(used, num_rows), (count,), generator=generator)
        if bad_ids and count:
            bad = torch.tensor([-1, num_rows, num_rows + 7, -(2**31), 2**31 - 1])
            is_bad = torch.rand(count, generator=generator) < 0.3
            ids = torch.where(is_bad, bad[torch.randint(0, len(bad), (count,), generator=generator)], ids)
        parts.append(ids)
    ids = torch.cat(parts)
    if draw(st.booleans()):
        ids = ids.to(torch.int32)
    has_weights = draw(st.booleans()) if weighted is None else weighted
    weights = torch.randn(ids.numel(), generator=generator) if has_weights else None
    return BagBatch(group, table_of_feature, batch_size, ids, offsets, weights)


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerSpec:
    lr = draw(st.sampled_from((1e-3, 0.1, 1.0)))
    l2 = draw(st.sampled_from((0.0, 1e-2)))
    clip = draw(st.sampled_from((None, CowClip(), CowClip(ratio=0.5, zeta=0.0), CowClip(ratio=1e-3, zeta=1e-2))))
    touches = draw(st.sampled_from(("none", "count", "base")))
    kind = draw(st.sampled_from(("sgd", "adam", "adam_row", "adagrad")))
    may_replay = touches == "none" and (clip is None or clip.ratio >= l2)
    absent = "replay" if may_replay and draw(st.booleans()) else "skip"
    if kind == "sgd":
        return SgdSpec(lr, l2, clip, touches, l2_absent_rows=absent)
    if kind == "adagrad":
        return RowwiseAdagradSpec(lr, l2, clip, touches, l2_absent_rows=absent)
    betas = draw(st.sampled_from(((0.9, 0.999), (0.0, 0.5))))
    is_row = kind == "adam_row"
    return AdamSpec(
        lr,
        l2,
        clip,
        touches,
        betas,
        bias_correction="row" if is_row else "global",
        step_per_moment=is_row and draw(st.booleans()),
        frozen=absent == "skip" and draw(st.booleans()),
        l2_absent_rows=absent,
    )
