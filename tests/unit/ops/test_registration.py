"""Layer 1: every op passes `torch.library.opcheck` (schema, fake kernel, autograd, tracing) and has wrapper, fake and reference."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from torchrec_kstep.ops import _library, fake, kernels, merge, messages, reference, reference_merge, reference_messages
from torchrec_kstep.ops.batch import Dedup, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

OPS = (
    "dedup",
    "pooled_lookup",
    "pooled_backward",
    "sequence_lookup",
    "sequence_backward",
    "merge_row_gradients",
    "apply_row_gradients",
    "row_norms",
    "read_rows",
    "write_rows",
    "prefetch_rows",
    "initial_values",
    "merge_collect",
    "merge_reduce",
    "merge_apply",
    "wire_encode",
    "wire_decode",
    "empty_message",
    "merge_owner_counts",
    "merge_pack",
    "merge_pack_contributions",
    "merge_reduce_messages",
    "merge_apply_messages",
)
# Ops whose wrapper has another name, because its module says the rest.
MERGE_WRAPPERS = {
    "merge_collect": "collect",
    "merge_reduce": "reduce",
    "merge_apply": "apply",
    "wire_encode": "encode",
    "wire_decode": "decode",
}
MESSAGE_WRAPPERS = {
    "empty_message": "empty",
    "merge_owner_counts": "owner_counts",
    "merge_pack": "pack",
    "merge_pack_contributions": "pack_contributions",
    "merge_reduce_messages": "reduce",
    "merge_apply_messages": "apply",
}
TABLES = [TableSpec("a", 10, 4, init="uniform", init_a=-1, init_b=1), TableSpec("b", 20, 4, 1)]
FEATURES = [0, 1, 0]


@pytest.fixture
def group() -> RowGroup:
    """Deferred, so that tracing may run a backward several times without changing a row."""
    made = RowGroup.in_dram(TABLES, AdamSpec(lr=0.1))
    made.set_step(0.1, 1)
    made.set_deferred(True)
    return made


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, Dedup]:
    _library.load()
    ids = torch.tensor([1, 2, 1, 3, 19, 19, 0, 9, 9])
    offsets = torch.tensor([0, 2, 3, 4, 6, 6, 9])
    return ids, offsets, kernels.dedup(ids, offsets, FEATURES, [10, 20], "error")


def check(name: str, *arguments: object) -> None:
    torch.library.opcheck(getattr(torch.ops.kstep, name).default, arguments)


def test_dedup(batch: tuple[torch.Tensor, torch.Tensor, Dedup]) -> None:
    ids, offsets, _ = batch
    for mode in range(3):
        check("dedup", ids, offsets, FEATURES, [10, 20], mode)
        check("dedup", ids.to(torch.int32), offsets, FEATURES, [10, 20], mode)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [0, 1])
def test_pooled(group: RowGroup, batch: tuple[torch.Tensor, torch.Tensor, Dedup], weighted: bool, pooling: int) -> None:
    ids, offsets, dedup = batch
    weights = torch.rand(ids.numel(), requires_grad=True) if weighted else None
    anchor = torch.empty(0, requires_grad=True)
    check("pooled_lookup", group.handle, anchor, weights, offsets, *dedup[:5], FEATURES, [4, 4], pooling)
    weights = None if weights is None else weights.detach()
    grad = torch.rand(2, 12)
    check("pooled_backward", group.handle, grad, weights, offsets, *dedup[:5], FEATURES, [4, 4], pooling, weighted)


def test_sequence(group: RowGroup, batch: tuple[torch.Tensor, torch.Tensor, Dedup]) -> None:
    ids, offsets, dedup = batch
    anchor = torch.empty(0, requires_grad=True)
    check("sequence_lookup", group.handle, anchor, offsets, *dedup[:5], FEATURES, [4, 4])
    check("sequence_backward", group.handle, torch.rand(ids.numel() * 4), offsets, *dedup[:5], FEATURES, [4, 4])


def test_gradients_and_fields(group: RowGroup) -> None:
    rows, offsets, counts = torch.tensor([1, 5, 2]), torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.int32)
    part = (rows, offsets, counts, torch.rand(12))
    check("merge_row_gradients", *[[column, column] for column in part], [4, 4])
    check("apply_row_gradients", group.handle, *part, None)
    check("apply_row_gradients", group.handle, *part, torch.rand(3))
    check("row_norms", group.handle, *part)
    check("read_rows", group.handle, 0, rows[:2], "m", 4, torch.float32)
    check("write_rows", group.handle, 0, rows[:2], "weight", torch.rand(2, 4))
    check("prefetch_rows", group.handle, rows, offsets)
    for kind in range(3):
        check("initial_values", rows, 7, 1, 3, 5, kind, -0.5, 0.5)


def test_merge_rounds() -> None:
    group = RowGroup.in_dram(TABLES, AdamSpec(lr=0.1, touches="count", bias_correction="row"))
    group.track(0, ("weight", "m", "v"))
    group.set_step(0.1, 1)
    group.pooled(torch.tensor([1, 5, 5]), torch.tensor([0, 1, 3]), [0]).sum().backward()
    rows = group.touched_rows(0)
    check("merge_collect", group.handle, 0, 0, rows, 0, 3, 4)
    sent = merge.collect(group, 0, rows)
    values = list(sent.values.values())
    check("merge_reduce", [rows, rows], [sent.counts, sent.counts], [*values, *values], [False, True, True], 0, 20, 2)
    check("merge_apply", group.handle, 0, 0, rows, sent.counts.to(torch.float32), values, 0, 3)
    for wire in (1, 2):
        check("wire_encode", values[0], wire, rows, -7)
        check("wire_decode", torch.ops.kstep.wire_encode(values[0], wire, rows, -7), wire, 4)


def test_merge_messages() -> None:
    group = RowGroup.in_dram(TABLES, AdamSpec(lr=0.1, touches="count", bias_correction="row"))
    group.track(0, ("weight",))
    group.set_step(0.1, 1)
    group.pooled(torch.tensor([1, 5, 5]), torch.tensor([0, 1, 3]), [0]).sum().backward()
    rows = group.touched_rows(0)
    formats, down = ([4, 1, 4], [1], [0]), ([4, 0, 4], [1], [0])
    # What it holds is whatever was in memory, so its values cannot be compared.
    torch.library.opcheck(torch.ops.kstep.empty_message.default, (24,), test_utils=("test_schema", "test_faketensor"))
    check("merge_owner_counts", [rows], [0], 1)
    counts, begins = torch.tensor([[2]]), torch.tensor([[0]])
    message = torch.zeros(8 + 8 + 32, dtype=torch.uint8)
    sizes = (*formats, [0], [0], 20, counts, begins)
    check("merge_pack", group.handle, 0, 0, [0], [rows], *sizes, message)
    sent = merge.collect(group, 0, rows)
    check("merge_pack_contributions", [rows], [sent.counts], list(sent.values.values()), *sizes, message)
    torch.ops.kstep.merge_pack(group.handle, 0, 0, [0], [rows], *sizes, message)
    reduced = ([message], counts, *formats, [0], [False], [0], 0, 20, 1)
    check("merge_reduce_messages", *reduced)
    merged, _ = torch.ops.kstep.merge_reduce_messages(*reduced)
    # To rows that this replica did not touch: what is told of touched ones changes with each call, and tracing calls several times.
    receiver = RowGroup.in_dram(TABLES, AdamSpec(lr=0.1, touches="count", bias_correction="row"))
    receiver.track(0, ("weight",))
    check("merge_apply_messages", receiver.handle, 0, 0, 3, [0], [merged], counts, begins, *down)


def test_every_op_has_a_wrapper_a_fake_kernel_and_a_reference(root: Path) -> None:
    sources = "".join(path.read_text() for path in (root / "kernels" / "ops").glob("*.cpp"))
    registered = set(re.findall(r'm\.impl\("(\w+)"', sources))
    assert registered == set(OPS)
    for name in OPS:
        if name in MERGE_WRAPPERS:
            wrapper, specification = (getattr(module, MERGE_WRAPPERS[name]) for module in (merge, reference_merge))
        elif name in MESSAGE_WRAPPERS:
            wrapper, specification = (getattr(module, MESSAGE_WRAPPERS[name]) for module in (messages, reference_messages))
        else:
            wrapper, specification = getattr(kernels, name), getattr(reference, name)
        assert list(inspect.signature(wrapper).parameters) == list(inspect.signature(specification).parameters), name
        assert f'"{name}"' in inspect.getsource(fake.register), name
