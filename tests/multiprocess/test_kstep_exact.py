"""KStepAdam: what it equals bit for bit.

Layer: multiprocess.
"""

from typing import Any

import pytest
import torch

from tests.multiprocess.kstep_cases import SPEC, Trained, env_of, outcome_of
from tests.multiprocess.tiny import one_rank_group
from tests.spawn import SpawnRanks
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


def _synchronous(_world: World, cases: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    return [
        Trained.make(env_of(case.pop("ranks_per_replica")), has_batch_norm=False, **case).train(range(8)).bits(with_states=False)
        for case in cases
    ]


def test_k_1_equals_ddp_with_synchronous_adam_bit_for_bit(spawn_ranks: SpawnRanks) -> None:
    """Two replicas of one rank against one replica of two ranks, which is TorchRec with DDP; whole tables compared."""
    cases = [{"ranks_per_replica": 1, "k": 1}, {"ranks_per_replica": 2, "k": 1, "is_deferred": True}]
    (first, synchronous), (second, synchronous_too) = spawn_ranks(_synchronous, 2, args=(cases,))
    assert first == second, "replicas differ"
    dense = [name for name in first if "mlp" in name]
    assert dense
    for name in dense:
        assert first[name] == synchronous[name] == synchronous_too[name], name
    parts = {name: bits for rank in (synchronous, synchronous_too) for name, bits in rank.items() if "ebc" in name}
    whole: dict[str, bytes] = {}
    for name in sorted(parts, key=lambda text: (text.split("@")[0], int(text.split("[")[1].split(",")[0]))):
        whole[name.split("@")[0]] = whole.get(name.split("@")[0], b"") + parts[name]
    assert whole == {name.split("@")[0]: bits for name, bits in first.items() if "ebc" in name}


@pytest.mark.parametrize("k", [1, 3, 100])
def test_one_replica_is_plain_adam_for_every_k(k: int) -> None:
    with one_rank_group():
        plain = Trained.make(env_of(1), k=7).train(range(9)).bits()
        merged = Trained.make(env_of(1), k=k)
        for step in range(9):
            merged.train([step])
            merged.optimizer.merge()
        assert merged.bits() == plain
        assert merged.optimizer.take_scalars() == {}


def _rounds(world: World, ranks_per_replica: int) -> dict[str, Any]:
    """Local steps with seeds of their own, and what replicas hold at each point."""
    env = env_of(ranks_per_replica)
    trained = Trained.make(env, seed=world.rank if ranks_per_replica == 1 else 5 + env.replica, k=4)
    start = trained.bits()
    trained.train(range(4))
    after_round = trained.bits()
    scalars = trained.optimizer.take_scalars()
    trained.train(range(4, 6))
    between = {name: value.detach().numpy().tobytes() for name, value in trained.dmp.module.named_parameters() if "mlp" in name}
    refusal = outcome_of(trained.optimizer.state_dict)
    trained.optimizer.merge()
    return {
        "position": env.layout.position,
        "start": start,
        "round": after_round,
        "between": between,
        "refusal": refusal,
        "flush": trained.bits(),
        "scalars": scalars,
        "state": (trained.optimizer.num_steps, trained.optimizer.num_rounds),
    }


@pytest.mark.parametrize(("world_size", "ranks_per_replica"), [(2, 1), (4, 2)])
def test_replicas_start_alike_drift_and_are_equal_after_rounds(spawn_ranks: SpawnRanks, world_size: int, ranks_per_replica: int) -> None:
    """Weights, moments and running statistics; also where dense parameters are merged in parts by the ranks of a replica."""
    ranks = spawn_ranks(_rounds, world_size, args=(ranks_per_replica,), timeout_s=110)
    for rank in ranks:
        twin = ranks[rank["position"]]
        for moment in ("start", "round", "flush"):
            differing = [name for name in twin[moment] if rank[moment][name] != twin[moment][name]]
            assert not differing, f"{moment}: {differing[:3]}"
        assert rank["round"] != rank["start"]
        assert rank["refusal"][0] == "CheckpointError"
        assert "2 steps" in rank["refusal"][1]
        assert rank["state"] == (6, 2)
        assert rank["scalars"]["rounds"] == 1
        assert rank["scalars"]["dense_sent_bytes"] > 0
        assert rank["scalars"]["union_rows"] >= rank["scalars"]["own_rows"] / 2 > 0
    assert ranks[0]["between"] != ranks[ranks_per_replica]["between"], "local steps must not exchange anything"


def _equal_data(_world: World) -> list[dict[str, bytes]]:
    """Replicas that see the same rows: merging must change nothing but the last bit.

    No batch normalisation: the gradient of a bias before it is rounding noise, which Adam would make steps of.
    """
    spec = MergeSpec(row_merge="touched", moments="renew")
    merged = Trained.make(env_of(1), k=3, merge=spec, has_batch_norm=False).train(range(6), stream=0)
    merged.optimizer.merge()
    # Longer than any k: it never merges, and its replicas stay what one replica alone would be.
    alone = Trained.make(env_of(1), k=100, merge=spec, has_batch_norm=False).train(range(6), stream=0)
    values = {name: param.detach().clone() for name, param in alone.dmp.module.named_parameters() if param.numel()}
    return [merged.bits(with_states=False), {name: value.numpy().tobytes() for name, value in values.items()}]


def test_equal_replicas_with_equal_data_are_one_replica(spawn_ranks: SpawnRanks) -> None:
    for merged, alone in spawn_ranks(_equal_data, 2):
        for name, bits in alone.items():
            other = next(value for key, value in merged.items() if key.endswith(name.removeprefix("module.")))
            ours, theirs = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (bits, other))
            torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=1e-9)


def _warm_up(_world: World) -> list[Any]:
    """K = 1 for three steps, then 4: the first steps are synchronous, so the round comes after step 7."""
    trained = Trained.make(env_of(1), k=4, num_warmup_steps=3).train(range(3))
    synchronous = trained.bits()
    reference = Trained.make(env_of(1), k=1).train(range(3)).bits()
    rounds = []
    for step in range(3, 8):
        trained.train([step])
        rounds.append(trained.optimizer.num_rounds)
    trained.optimizer.merge()
    return [synchronous, reference, rounds, trained.bits()]


def test_a_warm_up_is_synchronous_and_is_not_merged_again(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_warm_up, 2)
    assert {name: bits for name, bits in first[0].items() if "running" not in name} == {
        name: bits for name, bits in second[0].items() if "running" not in name
    }
    assert first[0] == first[1]
    assert first[2] == [0, 0, 0, 1, 1]
    assert first[3] == second[3]
    assert SPEC.touches == "count"
