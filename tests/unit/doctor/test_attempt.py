"""Attempts of a job share torchrun's store: each must see nothing of the one before, however its ranks come in."""

import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from torch._C._distributed_c10d import HashStore, Store

from torchrec_kstep.errors import RankFailure
from torchrec_kstep.runtime.attempt import clean_store
from torchrec_kstep.world import World


def attempt(store: Store, delays_s: list[float], timeout_s: float = 10.0, absent: tuple[int, ...] = ()) -> dict[int, Store | RankFailure]:
    """Starts all ranks but the absent, each after its delay."""
    world_size = len(delays_s)

    def one(rank: int) -> Store | RankFailure:
        time.sleep(delays_s[rank])
        try:
            return clean_store(store, World(rank, world_size, 0, 1), timeout_s)
        except RankFailure as error:
            return error

    ranks = [rank for rank in range(world_size) if rank not in absent]
    with ThreadPoolExecutor(world_size) as pool:
        return dict(zip(ranks, pool.map(one, ranks), strict=True))


@settings(max_examples=5)
@given(delays_s=st.lists(st.lists(st.sampled_from([0.0, 0.02, 0.1]), min_size=3, max_size=3), min_size=2, max_size=3))
def test_ranks_of_an_attempt_share_a_store_that_no_other_attempt_sees(delays_s: list[list[float]]) -> None:
    store = HashStore()
    for number, delays in enumerate(delays_s):
        stores = attempt(store, delays)
        first = stores[0]
        assert isinstance(first, Store)
        assert not first.check(["who"])
        first.set("who", str(number))
        for own in stores.values():
            assert isinstance(own, Store)
            assert own.get("who") == str(number).encode()


def test_ranks_left_over_from_the_last_attempt_do_not_stand_for_those_of_this_one() -> None:
    """Rank 2 took part in the first attempt; in the second it never comes, and its old signs do not hide that."""
    store = HashStore()
    attempt(store, [0.0] * 3)
    outcomes = attempt(store, [0.0] * 3, timeout_s=0.5, absent=(2,))
    assert "1 of 3 ranks did not come within 0.5 s: ranks [2] of hosts [2]" in str(outcomes[0])
    again = attempt(store, [0.0] * 3)
    assert all(isinstance(own, Store) for own in again.values())


def test_a_missing_rank_0_is_named() -> None:
    outcomes = attempt(HashStore(), [0.0] * 2, timeout_s=0.3, absent=(0,))
    assert isinstance(outcomes[1], RankFailure)
    with pytest.raises(RankFailure, match=r"rank 1 waited 0\.3 s for rank 0"):
        raise outcomes[1]
