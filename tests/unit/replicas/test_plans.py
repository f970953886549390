"""A plan for one replica, moved to another, and the digest by which ranks compare plans."""

from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.errors import PlanError
from torchrec_kstep.replicas import localize, plan_digest


def plan(b: Callable[..., Any] | None = None) -> ShardingPlan:
    tables = [EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=[f"f_{name}"]) for name in "ab"]
    places = {"a": row_wise(compute_kernel="fused"), "b": b or table_wise(1, compute_kernel="fused")}
    module = construct_module_sharding_plan(EmbeddingBagCollection(tables=tables), places, local_size=2, world_size=2, device_type="cpu")
    return ShardingPlan({"ebc": module})


def placements(of: ShardingPlan, table: str) -> list[str]:
    sharding: Any = of.plan["ebc"]
    return [str(shard.placement) for shard in sharding[table].sharding_spec.shards]


def test_ranks_and_places_move_together_and_the_original_stays() -> None:
    original = plan()
    moved = localize(original, 4, 2)
    assert placements(moved, "a") == ["rank:4/cpu", "rank:5/cpu"]
    assert placements(moved, "b") == ["rank:5/cpu"]
    assert placements(original, "a") == ["rank:0/cpu", "rank:1/cpu"]
    sharding: Any = moved.plan["ebc"]
    assert sharding["b"].ranks == [5]


def test_the_digest_knows_the_place_within_a_replica_only() -> None:
    assert plan_digest(localize(plan(), 6, 2), 6) == plan_digest(plan())
    assert plan_digest(plan(table_wise(0, compute_kernel="fused"))) != plan_digest(plan())
    assert plan_digest(plan(table_wise(1, compute_kernel="dense"))) != plan_digest(plan())


def test_a_plan_for_the_whole_job_is_refused_by_table() -> None:
    with pytest.raises(PlanError, match=r"table 'a'.*rank 1.*1 ranks"):
        localize(plan(), 0, 1)
