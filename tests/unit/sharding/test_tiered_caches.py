"""The tiers of a host, divided over the row stores of a plan. Layer: unit."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.errors import PlanError
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.planner import Job, TopologyShardingPlanner, find_tables
from torchrec_kstep.planner.plan import plan_alone
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.sharding.tiered.sharder import module_plans
from torchrec_kstep.sharding.tiered.shares import TierShares, check_quota, quota_of, rank_of, record_bytes, tiered_shards
from torchrec_kstep.tier_config import MIN_SEGMENTS, TierConfig
from torchrec_kstep.topology import find_topology, load_topology
from torchrec_kstep.units import MIB, format_bytes
from torchrec_kstep.world import World

ADAM = AdamSpec(lr=0.1)


def bags() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=rows, embedding_dim=32)
        for index, rows in enumerate((2_000_000, 500_000, 100))
    ]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


def shares_of(plan: Any, num_ranks: int, local_world_size: int | None = None) -> list[TierShares]:
    size = local_world_size or num_ranks
    return [TierShares.of_plan(module_plans(plan), find_tables(bags()), ADAM, rank, num_ranks, size) for rank in range(num_ranks)]


def planned(num_ranks: int, dram_bytes: int = 64 * MIB) -> Any:
    sharders = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig())
    job = Job(1024, num_ranks, num_ranks, dram_bytes_per_host=dram_bytes)
    return TopologyShardingPlanner(load_topology(find_topology("small_cpu")), job).plan(bags(), sharders)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_dram_of_a_host_is_given_out_as_planned(num_ranks: int) -> None:
    """Otherwise the plan would pay for caches that no table gets."""
    plan = planned(num_ranks)
    shares = [share.cache_shares or {} for share in shares_of(plan, num_ranks)]
    assert sum(sum(share.values()) for share in shares) == pytest.approx(num_ranks)
    caches = {name: sharding.cache_bytes for name, sharding in plan.plan["0"].items()}
    for rank, share in enumerate(shares):
        for table, part in share.items():
            assert rank in _holders(plan, table)
            assert part == pytest.approx(num_ranks * caches[table] / sum(caches[name] * len(_holders(plan, name)) for name in caches))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stores_get_all_of_their_host_and_no_more(num_ranks: int) -> None:
    """The parts of all stores of a host add up to the host's, whatever TorchRec makes a store of."""
    plan = planned(num_ranks)
    total_dram, quota = 0.0, 0
    tiers = TierConfig(64 * MIB, ["x"], ssd_bytes=640 * MIB, segment_bytes=MIB)
    for rank, shares in enumerate(shares_of(plan, num_ranks)):
        groups: dict[str, list[tuple[str, int]]] = {}
        for name, sharding in plan.plan["0"].items():
            for shard in tiered_shards(sharding):
                if rank_of(shard) == rank:
                    num_rows, dim = map(int, shard.shard_sizes)
                    groups.setdefault(sharding.sharding_type, []).append((name, record_bytes(num_rows, dim, ADAM)))
        for group in groups.values():
            total_dram += shares.of_store(group).dram
            quota += quota_of(shares.of_store(group), tiers) or 0
    assert total_dram == pytest.approx(num_ranks)
    assert 640 * MIB - 100 <= quota <= 640 * MIB


@given(
    rows=st.lists(st.integers(1, 10**9), min_size=1, max_size=12),
    quota_segments=st.integers(1, 200),
    spare_bytes=st.integers(0, 10**12),
)
def test_a_quota_is_refused_or_kept_with_the_least_for_every_store(rows: list[int], quota_segments: int, spare_bytes: int) -> None:
    """Small quotas fail when the plan is made, with the number that would do; others are never exceeded in sum."""
    shares = TierShares(sum(rows), sum(rows), len(rows))
    tiers = TierConfig(0, ["x"], ssd_bytes=max(quota_segments, MIN_SEGMENTS) * MIB + spare_bytes, segment_bytes=MIB)
    assert tiers.num_ssd_bytes is not None
    least = MIN_SEGMENTS * MIB
    if len(rows) * least > tiers.num_ssd_bytes:
        with pytest.raises(PlanError, match=rf"the {len(rows)} row stores of a host .* = {re.escape(format_bytes(len(rows) * least))}"):
            check_quota(shares, tiers)
        return
    check_quota(shares, tiers)
    given_out = [quota_of(shares.of_store([("t", num_bytes)]), tiers) or 0 for num_bytes in rows]
    assert min(given_out) >= least
    assert sum(given_out) <= tiers.num_ssd_bytes + len(rows)
    assert sum(given_out) >= tiers.num_ssd_bytes - len(rows) * (1 + tiers.num_ssd_bytes // 10**12)


def test_replicas_on_a_host_share_it() -> None:
    """Two replicas of one rank each on a host: each gets half, and the stores of both count."""
    plan = planned(1)
    alone, beside = shares_of(plan, 1, 1)[0], shares_of(plan, 1, 2)[0]
    assert beside.num_stores == 2 * alone.num_stores
    assert beside.host_bytes == 2 * alone.host_bytes
    assert beside.cache_shares == alone.cache_shares  # of the rank's equal part


def test_stores_do_not_depend_on_the_memory_that_a_plan_got() -> None:
    """A table that rests in DRAM by one plan and on SSD by another is in the same store: TorchRec sees neither tier nor cache."""
    for dram_bytes in (8 * MIB, 64 * MIB, 1 << 40):
        for sharding in planned(1, dram_bytes).plan["0"].values():
            assert sharding.cache_params is None
            assert not hasattr(sharding, "get_additional_fused_params")


def _holders(plan: Any, table: str) -> list[int]:
    return [shard.placement.rank() for shard in plan.plan["0"][table].sharding_spec.shards]


def test_a_plan_without_caches_leaves_the_division_to_bytes() -> None:
    config = PlannerConfig(kernel="tiered", engine="torchrec")
    plan = plan_alone(bags(), config, World(), build_sharders(config, OptimConfig()), batch_size=64)
    assert shares_of(plan, 1)[0].cache_shares is None
