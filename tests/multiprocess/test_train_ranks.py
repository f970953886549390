"""Layer: training on several ranks. Goal: the number of ranks changes nothing but speed; resuming is exact; uneven data is right.

Each test starts its ranks once and checks several things in them, because starting is what costs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, fingerprints, finish, one_rank_group, start, tiny_config
from tests.spawn import SpawnRanks
from torchrec_kstep.checkpoint import TrainState
from torchrec_kstep.errors import CheckpointError
from torchrec_kstep.loop import Loop
from torchrec_kstep.metrics.ctr import CTRMetrics
from torchrec_kstep.types import Predictions
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

LAYOUTS: list[dict[str, Any]] = [
    {"planner__sharding": "row_wise"},
    {"planner__sharding": "table_wise", "train__pipeline": "plain"},
    {"planner__sharding": "column_wise"},
    {"planner__sharding": "data_parallel"},
    {"planner__sharding": "row_wise", "planner__kernel": "fused", "optim__embedding": "rowwise_adagrad"},
    {"planner__sharding": "table_wise", "planner__kernel": "fused", "optim__embedding": "adagrad"},
    {"planner__sharding": "column_wise", "planner__kernel": "fused", "optim__embedding": "adagrad"},
]


def whole_tables(loop: Loop) -> dict[str, torch.Tensor]:
    """Weights and optimizer states put together from all ranks, by name. Collective."""
    state = {**{f"m.{k}": v for k, v in loop.dmp.state_dict().items()}}
    for name, entries in loop.optimizer.state_dict()["state"].items():
        state |= {f"o.{name}.{key}": value for key, value in entries.items()}
    mine: dict[str, list[tuple[tuple[int, ...], torch.Size, torch.Tensor]]] = {}
    for name, value in state.items():
        shards = value.local_shards() if hasattr(value, "local_shards") else []
        if not hasattr(value, "local_shards"):
            mine[name] = [((0,) * value.dim(), value.size(), value.detach().clone())]
        for shard in shards:
            mine.setdefault(name, []).append((tuple(shard.metadata.shard_offsets), value.size(), shard.tensor.detach().clone()))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    tables: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, chunks in part.items():
            for offsets, size, tensor in chunks:
                table = tables.setdefault(name, torch.full(size, float("nan")))
                table[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.size(), strict=True))] = tensor
    assert all(not table.isnan().any() for table in tables.values()), "some part is on no rank"
    return tables


def _resume_everywhere(world: World, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """For each layout: an unbroken run, and one that stops and resumes; returns the final tables by layout."""
    results = {}
    for number, layout in enumerate(LAYOUTS):
        config = tiny_config(checkpoint__every_steps=3, train__batch_size=16, **layout)
        where = folder / str(number)
        whole, whole_state = finish(config, world, TinyDataset(), where / "whole")
        broken, state = start(config, world, TinyDataset(), where / "broken")
        save = broken.checkpoints.save

        def save_and_die(state: TrainState, *rest: Any, save: Any = save) -> None:
            save(state, *rest)
            if state.step == 3:
                raise KeyboardInterrupt

        broken.checkpoints.save = save_and_die  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            broken.train(state)
        broken.sinks.close()
        torch.manual_seed(999 + world.rank)
        resumed, resumed_state = finish(config, world, TinyDataset(), where / "broken")
        assert resumed_state == whole_state
        assert_equal_bits(fingerprints(resumed), fingerprints(whole))
        results["-".join(map(str, layout.values()))] = whole_tables(whole)
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resuming_on_two_ranks_is_exact_and_one_rank_reads_the_same_tables(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    by_rank = spawn_ranks(_resume_everywhere, 2, args=(tmp_path,), timeout_s=150)
    with one_rank_group() as world:
        for number, (layout, tables) in enumerate(zip(LAYOUTS, by_rank[0].values(), strict=True)):
            loop, state = start(tiny_config(train__batch_size=32, **layout), world, TinyDataset(), tmp_path / str(number) / "whole")
            assert state.epoch == 2
            ours = whole_tables(loop)
            assert ours.keys() == tables.keys()
            for name, table in tables.items():
                assert torch.equal(ours[name], table), f"{layout}: {name}"


def _across_plans(world: World, folder: Path) -> None:
    """Saves under one sharding and loads under another: names and moments must survive."""
    config = tiny_config(train__batch_size=16, train__max_steps=4)
    first, _ = finish(
        tiny_config(train__batch_size=16, train__max_steps=4, planner__sharding="data_parallel"), world, TinyDataset(), folder
    )
    tables = whole_tables(first)
    for sharding in ("row_wise", "table_wise", "column_wise"):
        other = tiny_config(train__batch_size=16, train__max_steps=4, planner__sharding=sharding)
        loop, _ = start(other, world, TinyDataset(), folder)
        found = whole_tables(loop)
        assert found.keys() == tables.keys()
        assert all(torch.equal(found[name], tables[name]) for name in tables), sharding
    with pytest.raises(CheckpointError, match="global batch"):
        start(tiny_config(train__batch_size=32, train__max_steps=4), world, TinyDataset(), folder)
    path = next((folder / "checkpoints").iterdir()) / "rank_0001.safetensors"
    if world.rank == 0:
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank_0001\.safetensors has \d+ bytes, expected"):
        start(config, world, TinyDataset(), folder)  # on every rank, whichever of them looked


def test_another_sharding_reads_weights_and_moments_and_damage_is_known_to_all_ranks(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    spawn_ranks(_across_plans, 2, args=(tmp_path,))


UNEVEN = {"train__epochs": 1, "train__log_every_steps": 1, "model__dropout": 0.0, "optim__schedule": "constant", "optim__warmup_steps": 0}


def _uneven(world: World, folder: Path) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]], Any]:
    """4097 rows in global batches of 4096: in the last step only rank 0 has a row. Evaluation ends unevenly too."""
    dataset = TinyDataset(num_train=4097, num_eval=37)
    config = tiny_config(train__batch_size=4096 // world.world_size, train__eval_batch_size=16 // world.world_size, **UNEVEN)
    loop, _ = start(config, world, dataset, folder / f"of_{world.world_size}")
    losses: list[tuple[int, float]] = []
    compute = loop._loss.compute

    def note() -> tuple[float, int]:
        loss, num_rows = compute()
        losses.append((num_rows, loss))
        return loss, num_rows

    loop._loss.compute = note  # type: ignore[method-assign]
    loop.train(TrainState())
    report = loop.evaluate("test", 2)
    loop.sinks.close()
    return whole_tables(loop), losses, report


def test_a_rank_without_rows_and_uneven_evaluation_equal_one_rank(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    with one_rank_group() as world:
        tables, losses, report = _uneven(world, tmp_path)
    assert [num_rows for num_rows, _ in losses] == [4096, 1]
    assert report.num_rows == 37
    for others_tables, others_losses, others_report in spawn_ranks(_uneven, 2, args=(tmp_path,)):
        assert [num_rows for num_rows, _ in others_losses] == [4096, 1]
        assert [loss for _, loss in others_losses] == pytest.approx([loss for _, loss in losses], abs=1e-6)
        for name in (name for name in tables if name.startswith("m.")):
            torch.testing.assert_close(others_tables[name], tables[name], rtol=1e-4, atol=1e-5, msg=name)
        assert others_report.num_rows == 37
        assert others_report.auc == pytest.approx(report.auc, abs=5e-3)  # weights differ in the last bits


def _metrics_of_share(world: World, logit: torch.Tensor, label: torch.Tensor) -> Any:
    """5 batches on rank 0, 3 on the others, one of them all padding."""
    metrics = CTRMetrics()
    mine = slice(0, 50) if world.rank == 0 else slice(50 + 30 * (world.rank - 1), 50 + 30 * world.rank)
    for logits, labels in zip(logit[mine].split(10), label[mine].split(10), strict=True):
        padding = torch.zeros(4)
        weight = torch.cat((torch.ones(len(logits)), padding))
        metrics.update(Predictions(torch.cat((logits, padding + 9)), torch.cat((labels, padding)), weight))
    metrics.update(Predictions(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    return metrics.compute()


def test_metrics_over_uneven_ranks_are_those_of_one_process_bit_for_bit(spawn_ranks: SpawnRanks) -> None:
    generator = torch.Generator().manual_seed(5)
    logit = torch.randn(110, generator=generator).mul(4).round()  # many ties
    label = (torch.rand(110, generator=generator) < 0.4).float()
    alone = CTRMetrics()
    alone.update(Predictions(logit, label, torch.ones(110)))
    assert spawn_ranks(_metrics_of_share, 3, args=(logit, label)) == [alone.compute()] * 3


def _losses(world: World, folder: Path) -> dict[str, list[float]]:
    """The loss of each of 50 steps of 64 rows, per sharding."""
    found = {}
    for sharding in ("row_wise", "table_wise", "data_parallel"):
        config = tiny_config(
            planner__sharding=sharding,
            train__batch_size=64 // world.world_size,
            train__epochs=10,
            train__eval_every_epochs=10,
            train__log_every_steps=1,
            model__dropout=0.0,
        )
        run_dir = folder / f"{sharding}_of_{world.world_size}"
        _, state = finish(config, world, TinyDataset(num_train=300), run_dir)
        assert state.step == 50
        if world.is_main:
            lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            found[sharding] = [line["loss"] for line in lines if line["event"] == "train"]
            assert len(found[sharding]) == 50
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_fifty_steps_give_the_losses_of_one_rank(spawn_ranks: SpawnRanks, tmp_path: Path, world_size: int) -> None:
    with one_rank_group() as world:
        alone = _losses(world, tmp_path)
    together = spawn_ranks(_losses, world_size, args=(tmp_path,), timeout_s=280)[0]
    for sharding, losses in alone.items():
        assert together[sharding] == pytest.approx(losses, abs=1e-5), sharding
