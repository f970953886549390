"""What CowClip costs inside the fused backward: the same tables, ids and gradients with the clip and without it, in turns.

26 tables, rows updated by Adam, a global batch of 8192 single-valued bags per table, all rows in DRAM. `fires=never`: gradients of a mean
loss, whose norms stay below the bound, as in training; `fires=always`: gradients of a sum, so that every row is scaled down. Peer
`no_clip` is the backward without the clip: a ratio of 0.91 is an overhead of 10 %.
"""

import sys

import torch

from benchmarks._harness import Contender, Harness
from benchmarks.bench_tiered_bag import NUM_BATCHES, NUM_TABLES, Setting, Turn, draw_ids, our_group, our_side
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import CowClip
from torchrec_kstep.units import MIB

CASES = ((16, "zipf"), (64, "zipf"), (64, "uniform"), (128, "zipf"))


def measure(run: Harness, setting: Setting, ids: str) -> None:
    """Times the backward at one size."""
    batches = [draw_ids(ids, setting, seed) for seed in range(NUM_BATCHES)]
    groups = {"clip": our_group(setting, CowClip()), "no_clip": our_group(setting)}
    for fires, factor in (("never", 1e-4), ("always", 1.0)):
        grad = factor * torch.randn(setting.batch_size, NUM_TABLES * setting.dim)
        sides = {name: our_side(group, setting, grad) for name, group in groups.items()}
        for side in sides.values():
            side.turn = Turn(batches)
        before = clipped_rows(groups["clip"])
        ours, peer = (Contender(side.run_backward, side.run_forward) for side in sides.values())
        run.compare({**setting.case("backward", ids), "fires": fires}, ours, {"no_clip": peer})
        has_fired = clipped_rows(groups["clip"]) > before
        assert has_fired is (fires == "always"), "gradients of another size than the case says"


def clipped_rows(group: RowGroup) -> float:
    """Rows that the clip has scaled down so far."""
    return sum(counters["clipped_rows"] for counters in group.counters().values())


def main(argv: list[str] | None = None) -> int:
    """Runs all cases."""
    run = Harness.from_command_line("cowclip", __doc__, argv)
    batch_size, weight_bytes = (256, 16 * MIB) if run.quick else (8192, 512 * MIB)
    for dim, ids in CASES[1:2] if run.quick else CASES:
        measure(run, Setting(dim, weight_bytes // (4 * dim * NUM_TABLES), batch_size, torch.get_num_threads()), ids)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
