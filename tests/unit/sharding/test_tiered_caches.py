"""The caches of a plan, carried out: how a host's DRAM is divided over ranks and tables. Layer: unit."""

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.planner import Job, TopologyShardingPlanner
from torchrec_kstep.planner.plan import plan_alone
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.sharding.tiered.opening import planned_cache_shares
from torchrec_kstep.topology import find_topology, load_topology
from torchrec_kstep.units import MIB
from torchrec_kstep.world import World


def bags() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=rows, embedding_dim=32)
        for index, rows in enumerate((2_000_000, 500_000, 100))
    ]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_dram_of_a_host_is_given_out_as_planned(num_ranks: int) -> None:
    """Otherwise the plan would pay for caches that no table gets."""
    sharders = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig())
    job = Job(1024, num_ranks, num_ranks, dram_bytes_per_host=64 * MIB)
    plan = TopologyShardingPlanner(load_topology(find_topology("small_cpu")), job).plan(bags(), sharders)
    shares = [planned_cache_shares(plan, rank, num_ranks, num_ranks) or {} for rank in range(num_ranks)]
    assert sum(sum(share.values()) for share in shares) == pytest.approx(num_ranks)
    planned = {name: sharding.cache_bytes for name, sharding in plan.plan["0"].items()}
    for rank, share in enumerate(shares):
        for table, part in share.items():
            holders = [shard.placement.rank() for shard in plan.plan["0"][table].sharding_spec.shards]
            assert rank in holders
            assert part == pytest.approx(num_ranks * planned[table] / sum(planned[name] * len(_holders(plan, name)) for name in planned))


def _holders(plan: object, table: str) -> list[int]:
    return [shard.placement.rank() for shard in plan.plan["0"][table].sharding_spec.shards]  # type: ignore[attr-defined]


def test_a_plan_without_caches_leaves_the_division_to_bytes() -> None:
    config = PlannerConfig(kernel="tiered", engine="torchrec")
    plan = plan_alone(bags(), config, World(), build_sharders(config, OptimConfig()), batch_size=64)
    assert planned_cache_shares(plan, 0, 1, 1) is None
