"""The accuracy study of merged replicas: who trains which rows, crosses, the choice of rates, tables and plots. Layer: unit."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kstep_study
from benchmarks.kstep_replicas import Replicas
from benchmarks.kstep_rows import Column, Rows, add_cross, owners, shuffled, shuffled_by_owner
from benchmarks.kstep_study import METHODS, STAGES, SYNC, TASKS, Line, Results, Run, climb, plot, rate, table, train
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.data.manifest import NUM_RESERVED_IDS, UNSEEN_ID
from torchrec_kstep.sharding.tiered.state import kernels_of_model
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.types import FeatureSchema, SparseFeature

SCHEMA = FeatureSchema((), (SparseFeature("user", 20), SparseFeature("genres", 20, 0)))


def rows_of(users: list[int], bags: list[list[int]]) -> Rows:
    """Rows of a user and a bag each."""
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])])
    genres = Column(np.array([value for bag in bags for value in bag]), offsets)
    size = len(users)
    return Rows(SCHEMA, np.zeros((size, 0), np.float32), np.zeros(size, np.float32), {"user": Column(np.array(users)), "genres": genres})


@given(st.integers(1, 500), st.integers(1, 5), st.integers(1, 40))
def test_a_pass_holds_every_row_once_whatever_the_replicas(num_rows: int, num_replicas: int, batch_size: int) -> None:
    steps = list(shuffled(num_rows, num_replicas, batch_size, seed=1, epoch=0))
    assert sorted(np.concatenate([part for step in steps for part in step])) == list(range(num_rows))
    assert all(len(step) == num_replicas and max(map(len, step)) <= batch_size for step in steps)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(1, 4))
def test_a_value_belongs_to_one_replica(keys: list[int], num_replicas: int) -> None:
    owner = owners(np.array(keys), num_replicas)
    assert len({*zip(keys, owner.tolist(), strict=True)}) == len(set(keys))
    load = np.bincount(owner, minlength=num_replicas)
    assert load.max() - load.min() <= max(np.bincount(keys))


def test_by_owner_every_replica_trains_its_own_rows_in_whole_batches() -> None:
    owner = owners(np.random.default_rng(0).integers(0, 50, 1000), 4)
    steps = list(shuffled_by_owner(owner, 4, 30, seed=1, epoch=2))
    assert len(steps) == min(np.bincount(owner)) // 30
    for step in steps:
        for replica, rows in enumerate(step):
            assert len(rows) == 30
            assert (owner[rows] == replica).all()
    taken = np.concatenate([rows for step in steps for rows in step])
    assert len(set(taken.tolist())) == len(taken)


def test_a_batch_takes_bags_as_they_are() -> None:
    batch = rows_of([3, 4, 5], [[7], [8, 9], [6, 5, 4]]).batch(np.array([2, 0]), num_global_rows=4)
    assert batch.sparse["user"].values().tolist() == [5, 3]
    assert batch.sparse["genres"].values().tolist() == [6, 5, 4, 7]
    assert batch.sparse["genres"].lengths().tolist() == [3, 1]
    assert batch.num_global_rows == 4


def test_a_cross_knows_the_combinations_of_the_training_split() -> None:
    splits = {"train": rows_of([3, 3, 4], [[7], [8, 9], [7]]), "test": rows_of([3, 4, 3], [[8], [7], [9]])}
    crossed = add_cross(splits, "user_genre", ("user", "genres"))
    assert crossed["train"].schema.sparse[-1] == SparseFeature("user_genre", NUM_RESERVED_IDS + 3)
    train, test = (crossed[split].columns["user_genre"].ids.tolist() for split in ("train", "test"))
    assert sorted(train) == [NUM_RESERVED_IDS, NUM_RESERVED_IDS + 1, NUM_RESERVED_IDS + 2]
    assert test == [train[1], train[2], UNSEEN_ID]
    assert set(crossed["train"].batch(np.arange(3), 3).sparse.keys()) == {"user", "genres", "user_genre"}


@pytest.mark.parametrize("peak", [-5, -2, -1, 0, 1, 2, 3, 7])
def test_tuning_goes_on_beyond_its_grid_and_stops(peak: int) -> None:
    tried: list[int] = []

    def score(place: int) -> float:
        tried.append(place)
        return -abs(place - peak)

    assert climb(score, 1e-2) == rate(1e-2, max(-5, min(5, peak)))
    assert len(tried) == len(set(tried)) <= 7


def test_stages_name_what_there_is() -> None:
    for stage in STAGES.values():
        assert stage.task in TASKS
        assert set(stage.methods) <= set(METHODS) - set(SYNC.values())
        for method in stage.methods:
            METHODS[method].config(20)


@pytest.mark.parametrize(
    ("method", "lr"),
    [("sync_global", 22.6e-3), ("paper", 32e-3), ("paper, bf16", 32e-3), ("default, global bias", 22.6e-3), ("default", 32e-3)],
)
def test_a_variant_has_the_rate_of_its_recipe_unless_its_bias_correction_is_another(method: str, lr: float, tmp_path: Path) -> None:
    assert Results("frappe", tmp_path, tmp_path, 4).lr(method, 20, is_tuned=False) == lr


def test_a_stage_can_be_done_in_parts() -> None:
    stage = STAGES["variants"]
    assert stage.only(None) is stage
    assert stage.only(["default, frozen", "default", "default, bf16"]).methods == ("default", "default, frozen")


def test_a_run_that_another_process_has_done_is_not_done_again(tmp_path: Path) -> None:
    results, run = Results("frappe", tmp_path, tmp_path, 4), Run("default", 20, 1, 0.032)
    (tmp_path / "frappe.jsonl").write_text(json.dumps({"key": run.key, "test_auc": 0.9}) + "\n")
    assert results.result(run)["test_auc"] == 0.9


def test_k_falls_where_a_method_says_so() -> None:
    assert METHODS["default, half of k in the last third"].config(20, num_steps=600).stages == ["400:10"]
    assert METHODS["default"].config(20, num_steps=600).stages == []


def test_differences_are_paired_and_shown() -> None:
    sync = [{"test_auc": 0.8, "test_logloss": 0.5}, {"test_auc": 0.9, "test_logloss": 0.4}]
    found = [{"test_auc": 0.799, "test_logloss": 0.49}, {"test_auc": 0.897, "test_logloss": 0.41}]
    line = Line("paper", 20, 1e-2, found, sync, sync)
    mean, error = line.difference("test_auc", sync)
    assert (mean, error) == (pytest.approx(-0.002), pytest.approx(0.001))
    assert math.isnan(Line("paper", 20, 1e-2, found[:1], sync[:1], sync[:1]).difference("test_auc", sync[:1])[1])
    lines = [Line("sync_global", 1, 1e-2, sync), line]
    text = table("Toy", lines, 4)
    assert "| paper | 20 | 2 | 0.01 x 2 | 0.84800 | 0.45000 | -0.00200 ± 0.00100 |" in text
    chart = ElementTree.fromstring(plot("Toy", lines))
    assert "paper: mean, 95 % confidence" in "".join(chart.itertext())


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(("method", "num_replicas_trained"), [("default", 2), ("sync_row", 1)])
def test_replicas_on_ssd_clip_and_merge_as_those_in_dram(method: str, num_replicas_trained: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has folders of its own, and where rows lie changes no bit; without the clip other rows come out."""
    generator = np.random.default_rng(0)
    schema = FeatureSchema((), (SparseFeature("user", 400), SparseFeature("item", 300)))
    columns = {feature.name: Column(generator.integers(0, feature.num_rows, 640)) for feature in schema.sparse}
    split = Rows(schema, np.zeros((640, 0), np.float32), (generator.random(640) < 0.4).astype(np.float32), columns)
    rows = {"train": split, "validation": split, "test": split}
    opened: list[str] = []
    real = kstep_study.Replicas

    def replicas(config: RunConfig, *args: Any) -> Replicas:
        made = real(config, *args)
        kernels = [kernel for member in made.members for kernel in kernels_of_model(member.dmp)]
        opened.extend(path for kernel in kernels if isinstance(kernel.group, TieredTables) for path in kernel.group.paths)
        return made

    monkeypatch.setattr(kstep_study, "Replicas", replicas)
    found = {}
    for name in ("no_clip", "cowclip", "cowclip_ssd"):
        task = replace(TASKS[f"frappe_{name}"], batch_size=32, num_passes=2, table_lr=1.0)
        overrides = ["tiers.dram_bytes=16KiB" if text.startswith("tiers.dram_bytes") else text for text in task.overrides]
        config = load(RunConfig, "train", [*overrides, "model.embedding_dim=4", "model.mlp=[8]"])
        config = replace(config, optim=replace(config.optim, clip_ratio=1e-3))  # so small that it clips
        report = train(Run(method, 2, 1, 0.05), task, config, rows, num_replicas=2)["test"]
        found[name] = (report.auc, report.logloss)
    assert found["cowclip"] == found["cowclip_ssd"] != found["no_clip"]
    assert len({Path(path).parents[1] for path in opened}) == num_replicas_trained
    assert not any(Path(path).exists() for path in opened)
