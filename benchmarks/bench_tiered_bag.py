"""Embedding bags with all rows in DRAM: forward, backward + optimizer, and every other op, against FBGEMM and PyTorch.

All sides hold equal tables and read the same ids: 26 tables, 1 GiB of weights in all, a global batch of 8192 single-valued
bags per table. Ours updates with Adam (two states a weight); `fbgemm_tbe_adagrad` is FBGEMM's CPU kernel with EXACT_ADAGRAD
(one state; it has no Adam on CPU); `sparse_adam` is `nn.EmbeddingBag(sparse=True)` over one table of all rows with
`torch.optim.SparseAdam`. Bandwidth counts 2 x record x unique rows + 4 x dim x lookups bytes a backward: `memory_limit` is a
non-temporal copy on the same threads; `gather_limit` a bare loop that only reads and writes the same rows, prefetched alike, and reads
the same gradients. `native_*` are the C++ calls without PyTorch (`native/row_kernels_bench.cpp`), gradients on huge pages.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from benchmarks._harness import Contender, Harness, case_text
from benchmarks.bench_row_store import build
from torchrec_kstep.ops import kernels
from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, CowClip
from torchrec_kstep.units import GIB, MIB

NUM_TABLES = 26
ZIPF = 1.05
LR = 1e-3
NUM_BATCHES = 4
NUM_STATES = 3  # weights, m, v


@dataclass
class Setting:
    """Sizes of one case."""

    dim: int
    num_rows: int
    batch_size: int
    threads: int

    @property
    def num_ids(self) -> int:
        """Lookups of one batch."""
        return NUM_TABLES * self.batch_size

    def case(self, op: str, ids: str) -> dict[str, object]:
        """The parameters as a benchmark row shows them."""
        return {"op": op, "dim": self.dim, "ids": ids, "rows_per_table": self.num_rows, "batch": self.batch_size, "threads": self.threads}


def draw_ids(kind: str, setting: Setting, seed: int) -> torch.Tensor:
    """Returns `[26 * batch_size]` int64 ids, table after table; Zipf ids are scattered by a fixed permutation per table."""
    generator = np.random.default_rng(seed)
    shape = (NUM_TABLES, setting.batch_size)
    if kind == "uniform":
        ids = generator.integers(0, setting.num_rows, shape)
    else:
        cumulative = np.cumsum(np.arange(1, setting.num_rows + 1, dtype=np.float64) ** -ZIPF)
        ranks = np.searchsorted(cumulative / cumulative[-1], generator.random(shape)).clip(max=setting.num_rows - 1)
        ids = np.stack([np.random.default_rng(table).permutation(setting.num_rows)[ranks[table]] for table in range(NUM_TABLES)])
    return torch.from_numpy(ids.astype(np.int64).reshape(-1))


@dataclass
class Turn:
    """Hands out batches in turn, so that no side finds the last batch's rows in its cache."""

    batches: list[torch.Tensor]
    at: int = 0

    def next(self) -> torch.Tensor:
        """The next batch."""
        self.at += 1
        return self.batches[self.at % len(self.batches)]


@dataclass
class Side:
    """One implementation: a forward that returns what `finish` needs, and the backward with the update."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], object]
    turn: Turn = field(default_factory=lambda: Turn([]))
    out: torch.Tensor | None = None

    def run_forward(self) -> None:
        """Timed in the forward cases, not timed before a backward."""
        self.out = None  # a training step has dropped the last output by now
        self.out = self.forward(self.turn.next())

    def run_backward(self) -> None:
        """Timed in the backward cases."""
        assert self.out is not None, "a backward needs its forward"
        self.backward(self.out)
        self.out = None


def our_group(setting: Setting, clip: CowClip | None = None) -> RowGroup:
    """A group whose rows are all materialised, as they are once training has run for a while."""
    tables = [
        TableSpec(f"t{table}", setting.num_rows, setting.dim, table, init="uniform", init_a=-0.01, init_b=0.01)
        for table in range(NUM_TABLES)
    ]
    group = RowGroup.in_dram(tables, AdamSpec(lr=LR, clip=clip))
    group.set_step(LR, 1)
    rows = torch.arange(setting.num_rows)
    for table in range(NUM_TABLES):
        kernels.write_rows(group.handle, table, rows, "m", torch.zeros(setting.num_rows, setting.dim))
    return group


def our_side(group: RowGroup, setting: Setting, grad: torch.Tensor) -> Side:
    """Dedup and lookup with autograd; Adam inside backward."""
    offsets, features = torch.arange(setting.num_ids + 1), list(range(NUM_TABLES))
    return Side(lambda ids: group.pooled(ids, offsets, features), lambda out: out.backward(grad))


def tbe_side(setting: Setting, grad: torch.Tensor) -> Side:
    """FBGEMM's table-batched embedding on the CPU."""
    specs = [(setting.num_rows, setting.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * NUM_TABLES
    tbe = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=LR)
    offsets = torch.arange(setting.num_ids + 1)
    return Side(lambda ids: tbe(ids, offsets), lambda out: out.backward(grad))


def sparse_adam_side(setting: Setting, grad: torch.Tensor) -> Side:
    """One `nn.EmbeddingBag` over the rows of all tables; its output is `[26 * batch, dim]`, without the cost of a transpose."""
    module = torch.nn.EmbeddingBag(NUM_TABLES * setting.num_rows, setting.dim, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(list(module.parameters()), lr=LR)
    first_row = torch.arange(NUM_TABLES).repeat_interleave(setting.batch_size) * setting.num_rows
    offsets = torch.arange(setting.num_ids)
    flat_grad = grad.view(setting.num_ids, setting.dim)

    def backward(out: torch.Tensor) -> None:
        out.backward(flat_grad)
        optimizer.step()
        optimizer.zero_grad()

    return Side(lambda ids: module(ids + first_row, offsets), backward)


def memory_limit_bytes_per_s(threads: int, num_bytes: int) -> float:
    """Compiles and runs `stream_copy.cpp`."""
    source = Path(__file__).with_name("stream_copy.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stream_copy"
        subprocess.run(["g++", "-O3", "-std=c++17", "-mavx2", "-pthread", source, "-o", program], check=True, timeout=120)
        output = subprocess.run([program, str(threads), str(num_bytes)], check=True, capture_output=True, text=True, timeout=120).stdout
    return float(output)


def unique_rows(turn: Turn, group: RowGroup, setting: Setting) -> float:
    """Mean unique rows of the batches."""
    offsets, features = torch.arange(setting.num_ids + 1), list(range(NUM_TABLES))
    return statistics.mean(group.dedup(ids, offsets, features).unique_rows.numel() for ids in turn.batches)


def compare_training(run: Harness, setting: Setting, kinds: tuple[str, ...]) -> None:
    """Forward and backward rows against both peers, and the backward's share of the memory limit."""
    program = build("row_kernels_bench")
    grad = torch.randn(setting.batch_size, NUM_TABLES * setting.dim)
    group = our_group(setting)
    sides = {
        "": our_side(group, setting, grad),
        "fbgemm_tbe_adagrad": tbe_side(setting, grad),
        "sparse_adam": sparse_adam_side(setting, grad),
    }
    for kind in kinds:
        batches = [draw_ids(kind, setting, seed) for seed in range(NUM_BATCHES)]
        for side in sides.values():
            side.turn = Turn(batches)
        forward = {name: Contender(side.run_forward) for name, side in sides.items()}
        run.compare(setting.case("forward", kind), forward.pop(""), forward)
        backward = {name: Contender(side.run_backward, side.run_forward) for name, side in sides.items()}
        run.compare(setting.case("backward", kind), backward.pop(""), backward)
        compare_with_memory(run, setting, kind, unique_rows(sides[""].turn, group, setting))
        compare_bare_backward(run, setting, kind, group, grad, sides["fbgemm_tbe_adagrad"], batches)
        compare_native(run, setting, kind, program)


def compare_with_memory(run: Harness, setting: Setting, kind: str, num_unique: float) -> None:
    """Bytes of the last measured backward per second, against a copy around the cache."""
    num_bytes = 2 * 4 * NUM_STATES * setting.dim * num_unique + 4 * setting.dim * setting.num_ids
    limit = memory_limit_bytes_per_s(setting.threads, 64 * MIB if run.quick else GIB)
    ours = num_bytes / (run.rows[-1].value * 1e-3)
    run.record(setting.case("backward", kind), "bandwidth", "GB/s", ours / 1e9, "memory_limit", limit / 1e9, higher_is_better=True)


def compare_native(run: Harness, setting: Setting, kind: str, program: Path) -> None:
    """The C++ calls without PyTorch against FBGEMM's last measured ones, and against touching the same memory."""
    weight_bytes = 4 * setting.dim * NUM_TABLES * setting.num_rows
    command = [program, setting.dim, kind, setting.threads, weight_bytes, setting.batch_size, run.num_rounds]
    output = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, timeout=300).stdout
    lines = [line.split() for line in output.splitlines() if not line.startswith("unique_rows")]
    ms = {name: float(wall_ms) for name, wall_ms, _, _ in lines}
    rate = {name: float(num_bytes) / (float(wall_ms) * 1e-3) / 1e9 for name, wall_ms, _, num_bytes in lines}
    for op, value in (("forward", ms["dedup"] + ms["forward"]), ("backward", ms["backward"])):
        measured = case_text(setting.case(op, kind))
        tbe_ms = next(row.peer_value for row in run.rows if row.case == measured and row.peer == "fbgemm_tbe_adagrad")
        run.record(setting.case(f"native_{op}", kind), "time", "ms", value, "fbgemm_tbe_adagrad", tbe_ms)
    case = setting.case("native_backward", kind)
    for peer, limit in (("gather_limit", "touch_rows_and_grads"), ("memory_limit", "stream_copy")):
        run.record(case, "bandwidth", "GB/s", rate["backward"], peer, rate[limit], higher_is_better=True)


def compare_bare_backward(
    run: Harness, setting: Setting, kind: str, group: RowGroup, grad: torch.Tensor, tbe: Side, batches: list[torch.Tensor]
) -> None:
    """The backward op without autograd and without dedup, against FBGEMM's whole backward."""
    offsets, features = torch.arange(setting.num_ids + 1), list(range(NUM_TABLES))
    deduped = [group.dedup(ids, offsets, features) for ids in batches]
    turn = iter(range(10**9))

    def bare() -> None:
        batch = deduped[next(turn) % len(deduped)]
        kernels.pooled_backward(group.handle, grad, None, offsets, batch, features, group.table_dims, "sum", False)

    run.compare(setting.case("bare_backward", kind), bare, {"fbgemm_tbe_adagrad": Contender(tbe.run_backward, tbe.run_forward)})


def compare_small_ops(run: Harness, setting: Setting) -> None:
    """Each remaining op against the nearest PyTorch function on the same rows."""
    kind = "zipf"
    group = our_group(setting)
    ids = draw_ids(kind, setting, 0)
    offsets, features = torch.arange(setting.num_ids + 1), list(range(NUM_TABLES))
    rows_before = torch.arange(NUM_TABLES).repeat_interleave(setting.batch_size) * setting.num_rows
    dense = torch.zeros(NUM_TABLES * setting.num_rows, setting.dim)
    batch = group.dedup(ids, offsets, features)
    shifted = ids + rows_before
    run.compare(
        setting.case("dedup", kind),
        lambda: group.dedup(ids, offsets, features),
        {"torch_unique": lambda: torch.unique(shifted, return_inverse=True)},
    )
    sequence_grad = torch.randn(setting.num_ids * setting.dim)
    run.compare(
        setting.case("sequence_forward", kind),
        lambda: group.sequence_of(batch, offsets, features),
        {"index_select": lambda: dense.index_select(0, shifted)},
    )
    run.compare(
        setting.case("sequence_backward", kind),
        lambda: kernels.sequence_backward(group.handle, sequence_grad, offsets, batch, features, group.table_dims),
        {"index_add": lambda: dense.index_add_(0, shifted, sequence_grad.view(-1, setting.dim))},
    )
    group.set_deferred(True)
    group.sequence_of(batch, offsets, features).backward(sequence_grad)
    part = group.take_pending()
    run.compare(
        setting.case("merge_2_row_gradients", kind),
        lambda: kernels.merge_row_gradients([part, part], group.table_dims),
        {"torch_coalesce": coalesce(part, setting)},
    )
    run.compare(setting.case("apply_row_gradients", kind), lambda: group.apply(part), {})
    rows = torch.unique(ids[: setting.batch_size])
    values = torch.zeros(rows.numel(), setting.dim)
    run.compare(
        setting.case("read_rows", kind),
        lambda: kernels.read_rows(group.handle, 0, rows, "weight", setting.dim, torch.float32),
        {"index_select": lambda: dense.index_select(0, rows)},
    )
    run.compare(
        setting.case("write_rows", kind),
        lambda: kernels.write_rows(group.handle, 0, rows, "weight", values),
        {"index_copy": lambda: dense.index_copy_(0, rows, values)},
    )
    run.compare(setting.case("prefetch_rows", kind), lambda: group.prefetch(batch), {}, unit="us")
    run.compare(
        setting.case("initial_values", kind),
        lambda: kernels.initial_values(rows, 1, 2, 0, setting.dim, "uniform", -1.0, 1.0),
        {"torch_uniform": lambda: values.uniform_(-1.0, 1.0)},
    )


def coalesce(part: RowGradients, setting: Setting) -> Callable[[], object]:
    """PyTorch's way to add up two sparse gradients."""
    rows_before = torch.repeat_interleave(torch.arange(NUM_TABLES) * setting.num_rows, part.table_offsets.diff())
    index = (part.unique_rows + rows_before)[None]
    sparse = torch.sparse_coo_tensor(
        index, part.grads.view(-1, setting.dim), (NUM_TABLES * setting.num_rows, setting.dim), check_invariants=False
    )
    return lambda: (sparse + sparse).coalesce()


def measure_overhead(run: Harness, threads: int) -> None:
    """What a forward and a backward cost beside the work: a batch of one bag per table."""
    setting = Setting(dim=16, num_rows=100, batch_size=1, threads=threads)
    grad = torch.ones(1, NUM_TABLES * setting.dim)
    side = our_side(our_group(setting), setting, grad)
    side.turn = Turn([draw_ids("uniform", setting, 0)])

    def step() -> None:
        side.run_forward()
        side.run_backward()

    run.compare(setting.case("forward+backward", "uniform"), step, {})


def main(argv: list[str] | None = None) -> int:
    """Runs all cases."""
    run = Harness.from_command_line("tiered_bag", __doc__, argv)
    batch_size = 256 if run.quick else 8192
    weight_bytes = 16 * MIB if run.quick else GIB
    threads = torch.get_num_threads()
    dims = (64,) if run.quick else (64, 16, 128)
    for dim in dims:
        num_rows = weight_bytes // (4 * dim * NUM_TABLES)
        compare_training(run, Setting(dim, num_rows, batch_size, threads), ("zipf", "uniform"))
    num_rows = weight_bytes // (4 * 64 * NUM_TABLES)
    if threads > 1 and not run.quick:
        torch.set_num_threads(1)
        compare_training(run, Setting(64, num_rows, batch_size, 1), ("zipf",))
        torch.set_num_threads(threads)
    compare_small_ops(run, Setting(64, num_rows // 4, batch_size, threads))
    measure_overhead(run, threads)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
