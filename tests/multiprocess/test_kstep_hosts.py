"""KStepAdam: replicas and hosts are cut independently; what a host is changes no bit.

Layer: multiprocess.
"""

from typing import Any

import pytest
from torchrec.distributed.sharding_plan import table_row_wise

from tests.multiprocess.kstep_cases import Trained, env_of
from tests.spawn import SpawnRanks
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


def _trained(world: World, ranks_per_replica: int, is_host_sharded: bool) -> dict[str, Any]:
    env = env_of(ranks_per_replica)
    places = {"a": table_row_wise(host_index=env.replica_world.num_hosts - 1)} if is_host_sharded else {}
    trained = Trained.make(env, places=places, k=3).train(range(7))
    trained.optimizer.merge()
    layout = env.layout
    return {
        "bits": trained.bits(),
        "position": layout.position,
        "hosts": sorted({rank // world.local_world_size for rank in layout.sharding_ranks(layout.replica)}),
        "replica": layout.replica,
    }


def test_one_replica_over_two_hosts_ends_in_the_bits_of_two_replicas_on_one_host(spawn_ranks: SpawnRanks) -> None:
    """Four ranks as replicas of two: on one host, and on four hosts of one."""
    ends = {}
    for ranks_per_host in (4, 1):
        ranks = spawn_ranks(_trained, 4, local_world_size=ranks_per_host, args=(2, False), timeout_s=100)
        for rank in ranks:
            assert rank["bits"] == ranks[rank["position"]]["bits"], "replicas differ"
        ends[ranks_per_host] = [rank["bits"] for rank in ranks]
        assert [rank["hosts"] for rank in ranks] == {4: [[0]] * 4, 1: [[0, 1]] * 2 + [[2, 3]] * 2}[ranks_per_host]
    assert ends[1] == ends[4]


@pytest.mark.slow
def test_tables_sharded_over_the_ranks_of_one_host_of_a_replica(spawn_ranks: SpawnRanks) -> None:
    """Replicas of two hosts of two ranks; the table lies on the second host of each, and TorchRec sends in two legs."""
    ranks = spawn_ranks(_trained, 8, local_world_size=2, args=(4, True), timeout_s=110)
    for rank in ranks:
        assert rank["bits"] == ranks[rank["position"]]["bits"], "replicas differ"
        assert any(name.startswith(".ebc.embedding_bags.a") for name in rank["bits"]) == (rank["position"] >= 2)
