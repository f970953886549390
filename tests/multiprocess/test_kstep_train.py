"""`train` with replicas: resuming, another k, one replica, micro-batches.

Layer: multiprocess.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, close_stores, fingerprints, finish, on_ssd, start, tiny_config
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


def kstep_config(**changes: Any) -> RunConfig:
    shared = {"planner__kernel": "tiered", "planner__sharding": "row_wise", "train__batch_size": 16, "optim__schedule": "constant"}
    return tiny_config(**{**shared, "kstep__k": 4, "kstep__ranks_per_replica": 1, **changes})


def _resumed(world: World, folder: str) -> dict[str, Any]:
    """A run that saves every 3 steps with k = 4, inside intervals; stopped and resumed; then with k = 2, and as one replica."""
    root = Path(folder)
    config = kstep_config(checkpoint__every_steps=3)
    unbroken, state = finish(config, world, TinyDataset(), root / "unbroken")
    stopped = replace(config, train=replace(config.train, max_steps=6))
    finish(stopped, world, TinyDataset(), root / "stopped")
    resumed, _ = finish(config, world, TinyDataset(), root / "stopped")
    bits = fingerprints(unbroken)
    assert_equal_bits(fingerprints(resumed), bits)

    finish(stopped, world, TinyDataset(), root / "other")
    other = replace(config, kstep=replace(config.kstep, k=2))
    loop, restored = start(other, world, TinyDataset(), root / "other")
    assert loop.replicas is not None
    loop.train(restored)

    finish(stopped, world, TinyDataset(), root / "joined")
    joined, joined_state = start(replace(config, kstep=replace(config.kstep, ranks_per_replica=2)), world, TinyDataset(), root / "joined")
    assert joined_state.step == 6
    joined.train(joined_state)
    assert joined_state.best_auc is not None
    assert joined_state.best_auc > 0.6
    return {"steps": (state.step, restored.step), "auc": (state.best_auc, restored.best_auc), "bits": bits, "other": fingerprints(loop)}


def test_a_resumed_run_equals_an_unbroken_one_and_k_and_replicas_may_change(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    first, second = spawn_ranks(_resumed, 2, args=(str(tmp_path),), timeout_s=110)
    assert first["steps"][0] == first["steps"][1]
    assert min(first["auc"]) > 0.6
    assert_equal_bits(first["bits"], second["bits"])
    assert_equal_bits(first["other"], second["other"])


def _one_replica(world: World, folder: str) -> list[dict[str, bytes]]:
    """All ranks share one replica: k must not matter. And two replicas with micro-batches of half the size: they must agree."""
    one = [kstep_config(kstep__ranks_per_replica=2, kstep__k=k) for k in (1, 4)]
    found = [fingerprints(finish(config, world, TinyDataset(), Path(folder) / f"one{index}")[0]) for index, config in enumerate(one)]
    halves = kstep_config(train__batch_size=8, train__accumulation=2, kstep__num_warmup_steps=2)
    loop, _ = finish(halves, world, TinyDataset(), Path(folder) / "halves")
    return [*found, fingerprints(loop)]


def test_one_replica_does_not_depend_on_k_and_micro_batches_are_one_step(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    ranks = spawn_ranks(_one_replica, 2, args=(str(tmp_path),), timeout_s=110)
    for short, long, _ in ranks:
        skipped = {name for name in short if "kstep" in name}
        assert_equal_bits(short, long, tuple(skipped))
    assert_equal_bits(ranks[0][2], ranks[1][2])


def _tables_on_ssd(world: World, folder: str) -> list[dict[str, bytes]]:
    """Replicas whose tables lie on SSD behind a small cache, stopped and resumed, beside replicas in DRAM; CowClip with a low bound."""
    root = Path(folder)
    config = kstep_config(checkpoint__every_steps=3, optim__clip="cowclip", optim__clip_ratio=0.01, optim__clip_exempt=[])
    in_dram, _ = finish(config, world, TinyDataset(), root / "dram")
    tiered = on_ssd(config, root / "rows")
    stopped, _ = finish(replace(tiered, train=replace(config.train, max_steps=6)), world, TinyDataset(), root / "ssd")
    close_stores(stopped)
    loop, state = start(tiered, world, TinyDataset(), root / "ssd")
    assert state.step == 6
    loop.train(state)
    return [fingerprints(in_dram), fingerprints(loop)]


def test_replicas_on_ssd_end_in_the_bits_of_replicas_in_dram(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    for dram, ssd in spawn_ranks(_tables_on_ssd, 2, args=(str(tmp_path),), timeout_s=110):
        assert_equal_bits(ssd, dram)
