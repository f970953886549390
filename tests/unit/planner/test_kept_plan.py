"""Plans in run directories: what comes back from a file is the plan that was written, and only for the same wishes. Layer: unit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.errors import PlanError
from torchrec_kstep.planner.emit import TieredParameterSharding
from torchrec_kstep.planner.kept_plan import PLAN_NAME, KeptPlan, keep_plan, plan_wishes, read_kept_plan
from torchrec_kstep.planner.plan import plan_alone
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.replicas.plans import plan_digest
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.world import World

WORLD = World(0, 2, 0, 2)
CONFIGS = [
    PlannerConfig(kernel="tiered"),
    PlannerConfig(kernel="tiered", engine="torchrec", sharding="row_wise"),
    PlannerConfig(kernel="tiered", tables={"t0": "column_wise", "t1": "table_row_wise"}),
    PlannerConfig(kernel="dense", tables={"t0": "data_parallel", "t2": "column_wise"}),
    PlannerConfig(kernel="dense", engine="torchrec", sharding="data_parallel"),
]


def bags() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=rows, embedding_dim=8)
        for index, rows in enumerate((1000, 70, 9))
    ]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


def kept(config: PlannerConfig, **changes: Any) -> KeptPlan:
    module = bags()
    plan = plan_alone(module, config, WORLD, build_sharders(config, OptimConfig()), batch_size=64)
    return KeptPlan(plan, plan_wishes(replace(config, **changes), "dram", WORLD, find_tables(module)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_plan_survives_its_file(tmp_path: Path, config: PlannerConfig) -> None:
    """Every shard, rank and kernel, and what only our sharder reads; without pickle."""
    written = kept(config)
    keep_plan(tmp_path, written)
    json.loads((tmp_path / PLAN_NAME).read_text())
    plan, note = read_kept_plan(tmp_path, written.wishes)
    assert plan is not None
    assert note == f"sharded as it began, by {tmp_path / PLAN_NAME}"
    assert plan_digest(plan) == plan_digest(written.plan)
    for path, module in written.plan.plan.items():
        for name, sharding in module.items():
            found = plan.plan[path][name]
            assert type(found) is type(sharding)
            if isinstance(sharding, TieredParameterSharding):
                assert (found.tier, found.cache_bytes) == (sharding.tier, sharding.cache_bytes)
            if sharding.sharding_spec is not None:
                assert list(map(str, found.sharding_spec.shards)) == list(map(str, sharding.sharding_spec.shards))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sharding": "row_wise"}, "planner.sharding was auto, is row_wise"),
        ({"tables": {"t0": "row_wise"}}, 'planner.tables was {}, is {"t0": "row_wise"}'),
        ({"engine": "torchrec"}, "planner.engine was topology, is torchrec"),
    ],
)
def test_other_wishes_ask_for_another_plan(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    keep_plan(tmp_path, kept(CONFIGS[0]))
    assert read_kept_plan(tmp_path, kept(CONFIGS[0], **change).wishes) == (None, f"planned anew: {says}")


def test_another_table_or_number_of_ranks_asks_for_another_plan(tmp_path: Path) -> None:
    written = kept(CONFIGS[0])
    keep_plan(tmp_path, written)
    assert read_kept_plan(tmp_path, {**written.wishes, "table t9": "5 rows of 8"})[1] == (
        "planned anew: table t9 was not there, is 5 rows of 8"
    )
    fewer = plan_wishes(CONFIGS[0], "dram_ssd", World(), find_tables(bags()))
    assert read_kept_plan(tmp_path, fewer)[1] == "planned anew: ranks was 2, 2 on a host, is 1, 1 on a host and 1 more"


def test_a_run_without_a_plan_has_nothing_to_say(tmp_path: Path) -> None:
    assert read_kept_plan(tmp_path, {}) == (None, "")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "x", "version": 1}', '{"format": "torchrec_kstep.plan", "version": 9}', "\x00", '{"format": 1']
)
def test_a_file_that_is_no_plan_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / PLAN_NAME).write_text(text)
    with pytest.raises(PlanError, match=rf"{PLAN_NAME}.*planner\.renew=true"):
        read_kept_plan(tmp_path, {})


def test_a_plan_that_was_changed_by_hand_is_named(tmp_path: Path) -> None:
    keep_plan(tmp_path, kept(CONFIGS[0]))
    body = json.loads((tmp_path / PLAN_NAME).read_text())
    table = next(iter(next(iter(body["modules"].values())).values()))
    table["ranks"] = "zero"
    (tmp_path / PLAN_NAME).write_text(json.dumps(body))
    with pytest.raises(PlanError, match=rf"{PLAN_NAME} cannot be read as a plan: ValueError"):
        read_kept_plan(tmp_path, {})
