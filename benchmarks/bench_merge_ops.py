"""The ops of a merge round (collect, reduce, apply, encode, decode) against a plain copy and against their PyTorch reference.

One table, Adam with row-wise bias correction; `rows` of them, spread evenly, were touched since the last round. MB/s counts
the float32 payload: rows x fields x dim x 4 bytes, at `reduce` the contributions that come in. `copy` is `Tensor.copy_` of a
payload of the same size, `reference` the same op in plain PyTorch on the same numbers. A round is fast enough when its ops
move more than the network: 1 Gbit/s is 125 MB/s.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks._harness import Contender, Harness
from torchrec_kstep.ops import merge, reference, reference_merge
from torchrec_kstep.ops.batch import Contributions, Merged, RowGradients, TableSpec, Wire
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

K = 20
NUM_REPLICAS = 4
WIRES: tuple[Wire, ...] = ("bf16", "int8")
Call = Callable[[], object]


@dataclass
class Setting:
    """Sizes of one case."""

    dim: int
    num_rows: int
    num_touched: int
    fields: tuple[str, ...]

    def case(self, op: str, **more: object) -> dict[str, object]:
        """The parameters as a benchmark row shows them."""
        fields = "+".join(self.fields)
        return {"op": op, "dim": self.dim, "fields": fields, "rows": self.num_touched, "threads": torch.get_num_threads(), **more}

    @property
    def payload_bytes(self) -> int:
        """Of all fields of the touched rows."""
        return self.num_touched * len(self.fields) * self.dim * 4


def touched_groups(setting: Setting) -> tuple[RowGroup, ReferenceGroup]:
    """A group and its reference after two updates of the rows of this round."""
    table, optimizer = TableSpec("t", setting.num_rows, setting.dim), AdamSpec(1e-3, touches="count", bias_correction="row")
    group, expected = RowGroup.in_dram([table], optimizer), ReferenceGroup([table], optimizer)
    rows = torch.arange(setting.num_touched) * (setting.num_rows // setting.num_touched)
    gradients = RowGradients(
        rows,
        torch.tensor([0, setting.num_touched]),
        torch.ones(setting.num_touched, dtype=torch.int32),
        torch.randn(setting.num_touched * setting.dim),
    )
    for either in (group, expected):
        either.track(0, setting.fields)
    for step in (1, 2):
        group.set_step(1e-3, step)
        expected.lr, expected.step = 1e-3, step
        group.apply(gradients)
        reference.apply_row_gradients(expected, gradients)
    return group, expected


def compare(run: Harness, case: Mapping[str, object], ours: Call, theirs: Call, payload_bytes: int, num_rows: int) -> None:
    """Adds throughput in bytes against a copy and the reference, and in rows."""
    source, target = (torch.ones(max(payload_bytes // 4, 1)) for _ in range(2))
    peers: dict[str, Contender | Call] = {"copy": lambda: target.copy_(source), "reference": theirs}
    run.compare(case, ours, peers, unit="MB", num_items=max(payload_bytes // 10**6, 1))
    run.record(case, "throughput", "rows/s", run.rows[-1].value * num_rows / max(payload_bytes // 10**6, 1), higher_is_better=True)


def contributions_of(sent: Contributions, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[Contributions]]:
    """What replicas send to an owner: half of the rows are touched by all, the rest by one each."""
    shared = torch.arange(rows.numel()) % 2 == 0
    keys, parts = [], []
    for replica in range(NUM_REPLICAS):
        chosen = (shared | (torch.arange(rows.numel()) // 2 % NUM_REPLICAS == replica)).nonzero()[:, 0]
        keys.append(rows[chosen])
        parts.append(Contributions(sent.counts[chosen], {name: value[chosen] for name, value in sent.values.items()}))
    return keys, parts


def compare_round(run: Harness, setting: Setting) -> None:
    """Collect, reduce and apply of one table."""
    group, expected = touched_groups(setting)
    rows = group.touched_rows(0)
    num_rows, payload = setting.num_touched, setting.payload_bytes
    compare(
        run,
        setting.case("collect"),
        lambda: merge.collect(group, 0, rows),
        lambda: reference_merge.collect(expected, 0, rows),
        payload,
        num_rows,
    )
    sent = merge.collect(group, 0, rows)
    keys, parts = contributions_of(sent, rows)
    num_sent = sum(key.numel() for key in keys)
    arguments = (keys, [part.counts for part in parts], [part.values for part in parts], "renew", "union", K, NUM_REPLICAS)
    compare(
        run,
        setting.case("reduce", replicas=NUM_REPLICAS),
        lambda: merge.reduce(*arguments),  # type: ignore[arg-type]  # the tuple forgets which texts these are
        lambda: reference_merge.reduce(*arguments),  # type: ignore[arg-type]  # as above
        payload * num_sent // num_rows,
        num_sent,
    )
    merged = Merged(rows, sent.counts.to(torch.float32), sent.values)
    compare(
        run,
        setting.case("apply"),
        lambda: merge.apply(group, 0, merged),
        lambda: reference_merge.apply(expected, 0, merged),
        payload,
        num_rows,
    )


def compare_wire(run: Harness, setting: Setting, wire: Wire) -> None:
    """Encode and decode of one field."""
    values, rows = torch.randn(setting.num_touched, setting.dim), torch.arange(setting.num_touched)
    payload = values.numel() * 4
    encoded = merge.encode(values, wire, rows, 1)
    for op, ours, theirs in (
        ("encode", lambda: merge.encode(values, wire, rows, 1), lambda: reference_merge.encode(values, wire, rows, 1)),
        ("decode", lambda: merge.decode(encoded, wire, setting.dim), lambda: reference_merge.decode(encoded, wire, setting.dim)),
    ):
        compare(run, setting.case(op, wire=wire), ours, theirs, payload, setting.num_touched)


def main(argv: list[str] | None = None) -> int:
    """Runs all cases."""
    run = Harness.from_command_line("merge_ops", __doc__, argv)
    num_touched = 2_000 if run.quick else 100_000
    for dim in (64,) if run.quick else (64, 16):
        for fields in (("weight",), ("weight", "m", "v")):
            compare_round(run, Setting(dim, 4 * num_touched, num_touched, fields))
        for wire in WIRES:
            compare_wire(run, Setting(dim, num_touched, num_touched, ("weight",)), wire)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
