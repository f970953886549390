"""Ranks agree through a store before a round: differences, illness and absence are named, within the deadline."""

import threading
import time
from typing import Any

from torch._C._distributed_c10d import HashStore

from torchrec_kstep.errors import DivergenceError, MergeError, RankFailure
from torchrec_kstep.replicas import RoundAgreement
from torchrec_kstep.world import World


def ask_all(answers: list[list[tuple[dict[str, Any], str]]], timeout_s: float = 5.0) -> list[list[BaseException | None]]:
    """What came of the questions of each rank: an error, or None."""
    store = HashStore()
    outcomes: list[list[BaseException | None]] = [[] for _ in answers]

    def ask(rank: int) -> None:
        agreement = RoundAgreement(store, World(rank, len(answers), rank, len(answers)), timeout_s)
        for facts, ill in answers[rank]:
            try:
                agreement.agree(facts, ill)
                outcomes[rank].append(None)
            except Exception as error:
                outcomes[rank].append(error)
                return

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_equal_ranks_go_on_round_after_round() -> None:
    rounds = [({"step": 4 * index}, "") for index in range(5)]
    assert ask_all([rounds] * 3) == [[None] * 5] * 3


def test_uneven_numbers_of_batches_are_named_on_every_rank() -> None:
    """10 batches on one rank and 7 on another, k = 4: the second question is a round after step 8 here and a flush after 7 there."""
    ten = [({"step": 4, "reason": "round"}, ""), ({"step": 8, "reason": "round"}, "")]
    seven = [({"step": 4, "reason": "round"}, ""), ({"step": 7, "reason": "flush"}, "")]
    for first, second in ask_all([ten, seven]):
        assert first is None
        assert isinstance(second, MergeError)
        assert "step is 7 there and 8 on rank 0" in str(second)


def test_an_ill_rank_stops_all_with_its_own_words() -> None:
    facts = {"step": 1}
    for outcome in ask_all([[(facts, "")], [(facts, "3 of 8 values of dense parameter 'w' are NaN")], [(facts, "")]]):
        assert isinstance(outcome[0], DivergenceError)
        assert "rank 1: 3 of 8 values of dense parameter 'w' are NaN" in str(outcome[0])


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    begin = time.monotonic()
    outcomes = ask_all([[({"step": 1}, "")], [], [({"step": 1}, "")]], timeout_s=0.5)
    assert time.monotonic() - begin < 30
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome[0], RankFailure)
        assert "ranks [1] did not come" in str(outcome[0])
