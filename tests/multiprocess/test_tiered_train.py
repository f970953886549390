"""`train` with tiered tables: the same losses for every number of ranks, micro-batch, cache and pipeline; exact resume.

Layer: multiprocess.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.multiprocess.tiered_cases import gathered
from tests.multiprocess.tiny import (
    TinyDataset,
    assert_equal_bits,
    close_stores,
    fingerprints,
    finish,
    on_ssd,
    one_rank_group,
    start,
    tiered_config,
    tiny_config,
)
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import DivergenceError
from torchrec_kstep.loop import Loop
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


def _train(world: World, configs: list[RunConfig], folder: str) -> list[dict[str, torch.Tensor]]:
    results = []
    for index, config in enumerate(configs):
        loop, state = finish(config, world, TinyDataset(), Path(folder) / f"run_{world.world_size}_{index}")
        assert state.best_auc is not None
        assert state.best_auc > 0.6
        results.append(gathered(loop.dmp.state_dict()))
    return results


def test_ranks_micro_batches_and_pipelines_do_not_matter(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    """Otherwise a table's gradient would be scaled, or stepped, once per rank or micro-batch."""
    one = [tiered_config(), tiered_config(train__batch_size=8, train__accumulation=4), tiered_config(train__pipeline="plain")]
    two = [
        tiered_config(train__batch_size=16),
        tiered_config(train__batch_size=16, planner__tables={"tags": "table_wise", "wide_user": "column_wise"}),
        tiered_config(train__batch_size=8, train__accumulation=2, train__pipeline="base"),
    ]
    expected, *others = spawn_ranks(_train, 1, args=(one, str(tmp_path)))[0]
    others += spawn_ranks(_train, 2, args=(two, str(tmp_path)))[0]
    for other in others:
        for name, value in expected.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("dram_bytes", ["0B", "4KiB", "1MiB"])
def test_a_cache_of_any_size_trains_bit_for_bit_as_dram(tmp_path: Path, dram_bytes: str) -> None:
    """Otherwise how much memory a machine has would change the model."""
    with one_rank_group() as world:
        expected, _ = finish(tiered_config(), world, TinyDataset(), tmp_path / "dram")
        actual, _ = finish(on_ssd(tiered_config(), tmp_path / "rows", dram_bytes), world, TinyDataset(), tmp_path / "ssd")
        assert_equal_bits(fingerprints(actual), fingerprints(expected))


@pytest.mark.parametrize(
    ("tables", "absent_rows"),
    [
        ("dram", "skip"),
        ("store", "replay"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dram", "replay"), ("store", "skip"), ("full", "skip"), ("full", "replay"))
        ),
    ],
)
def test_resuming_equals_not_stopping_bit_for_bit(tmp_path: Path, tables: str, absent_rows: str) -> None:
    """Rows, moments and the number of steps all come back. Whole tables are read by any store, snapshots by their own."""
    config = tiered_config(
        train__batch_size=8,  # most rows are absent from most steps
        checkpoint__every_steps=3,
        checkpoint__tables="full" if tables == "full" else "store",
        optim__embedding_l2=1e-2,
        optim__l2_absent_rows=absent_rows,
    )

    def tiers(name: str) -> RunConfig:
        return config if tables == "dram" else on_ssd(config, tmp_path / name, "8KiB")

    with one_rank_group() as world:
        stopped = replace(tiers("stopped"), train=replace(config.train, max_steps=6), optim=replace(config.optim, schedule="constant"))
        unbroken = replace(tiers("constant"), optim=stopped.optim)
        expected, _ = finish(unbroken, world, TinyDataset(), tmp_path / "run_constant")
        close_stores(finish(stopped, world, TinyDataset(), tmp_path / "run_stopped")[0])
        resumed = replace(tiers("stopped" if tables == "store" else "resumed"), optim=stopped.optim)
        actual, state = start(resumed, world, TinyDataset(), tmp_path / "run_stopped")
        assert state.step == 6
        actual.train(state)
        assert_equal_bits(fingerprints(actual), fingerprints(expected))


def test_counters_of_the_tables_are_recorded(tmp_path: Path) -> None:
    """Otherwise nobody would see that a cache is too small."""
    with one_rank_group() as world:
        finish(on_ssd(tiered_config(), tmp_path / "rows", "2KiB"), world, TinyDataset(), tmp_path / "ssd")
        finish(tiered_config(), world, TinyDataset(), tmp_path / "dram")
        finish(tiny_config(), world, TinyDataset(), tmp_path / "dense")
    ssd, dram, dense = (_last_counters(tmp_path / name) for name in ("ssd", "dram", "dense"))
    assert ssd["hits_rows"] + ssd["misses_rows"] + ssd["first_touches_rows"] > 0
    assert 0 < ssd["hit_ratio"] < 1
    assert dram["materialised_rows"] == 2 * (24 + 17 + 9)  # each id of the set, in its table and in its first-order table
    assert dense == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_names_the_table(tmp_path: Path, value: float) -> None:
    """Tiered tables have no parameter that could be looked at; without this the message would say that all is well."""
    with one_rank_group() as world:
        loop, state = start(on_ssd(tiered_config(), tmp_path / "rows"), world, TinyDataset(), tmp_path)
        _set_all_rows(loop, "item", value)
        with pytest.raises(DivergenceError, match=r"the loss of step 1 is NaN or infinite \(not finite after it: .*tiered table 'item'"):
            loop.train(state)


def _set_all_rows(loop: Loop, table: str, value: float) -> None:
    [weight] = [weight for name, weight in loop.dmp.state_dict().items() if name.endswith(f".{table}.weight")]
    for shard in weight.local_shards():
        shard.tensor.fill_(value)


def _last_counters(run_dir: Path) -> dict[str, float]:
    records = [json.loads(line) for line in next(run_dir.glob("*.jsonl")).read_text().splitlines()]
    found = [record for record in records if record["event"] == "tiers"]
    return found[-1] if found else {}
