"""Tiered tables in any sharding train as an unsharded collection does.

Layer: multiprocess. The slow lane runs the whole matrix.
"""

import itertools
from dataclasses import replace

import pytest

from tests.multiprocess.tiered_cases import CLIPPED, MEAN, REPLAYING, SUM, Case, check_cases
from tests.spawn import SpawnRanks

pytestmark = pytest.mark.multiprocess

STOCK = {"b": "fused", "c": "fused"}
FAST_CASES = [
    Case(("rw", "tw_last", "cw_same"), (MEAN, MEAN, SUM)),
    Case(("rw", "rw", "tw0"), (SUM, MEAN, MEAN), stock=STOCK, uneven=True),
    Case(("cw", "rw", "tw_last"), weighted=True),
    Case(("rw", "tw0", "cw"), deferred=True, micro_batches=3),
    Case(("rw", "tw0", "dp"), (MEAN, SUM, MEAN), stock={"c": "dense"}),
    Case(("rw", "tw_last", "rw"), (MEAN, SUM, SUM), optimizer=CLIPPED, uneven=True),
    Case(("tw0", "rw", "cw"), optimizer=CLIPPED, deferred=True, micro_batches=2),
    Case(("rw", "tw_last", "cw_same"), (MEAN, MEAN, SUM), optimizer=REPLAYING, uneven=True),
    Case(("tw0", "rw", "rw"), optimizer=replace(CLIPPED, l2_absent_rows="replay"), deferred=True, micro_batches=2),
    Case(("cw", "cw_same", "rw"), (MEAN, SUM, SUM), optimizer=CLIPPED, deferred=True, uneven=True),
    Case(("cw", "tw_last", "cw"), optimizer=replace(CLIPPED, l2_absent_rows="replay"), deferred=True, micro_batches=2),
]
TWO_HOSTS = [
    Case(("twrw0", "twrw_last", "rw"), (MEAN, SUM, MEAN), uneven=True),
    Case(("grid", "grid", "tw0"), (SUM, MEAN, MEAN), dim=256, rows=(41, 2, 7)),
    Case(("twrw0", "rw", "twrw_last"), (MEAN, SUM, SUM), optimizer=CLIPPED),
    Case(("grid", "cw", "grid"), dim=256, rows=(41, 2, 7), optimizer=CLIPPED, deferred=True),
    Case(("tw_last", "rw", "tw0"), optimizer=CLIPPED, uneven=True),
]


@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_training_equals_an_unsharded_collection(spawn_ranks: SpawnRanks, world_size: int, local_world_size: int) -> None:
    """Otherwise a lost row, a wrong gradient scale or an average taken twice would hide behind a falling loss."""
    cases = TWO_HOSTS if local_world_size < world_size else FAST_CASES
    spawn_ranks(check_cases, world_size, local_world_size, args=(cases,))


def _matrix(num_hosts: int) -> list[Case]:
    """Every sharding type alone and beside others, with every pooling, all tables ours or mixed with stock kernels."""
    places = [("tw0", "tw_last", "tw0"), ("rw", "rw", "rw"), ("cw", "cw_same", "cw"), ("twrw0", "twrw_last", "twrw0")]
    places += [("rw", "tw0", "cw"), ("twrw0", "rw", "cw_same"), ("tw_last", "twrw_last", "rw"), ("cw", "rw", "dp")]
    poolings = [(SUM, SUM, SUM), (MEAN, MEAN, MEAN), (SUM, MEAN, SUM), (MEAN, SUM, MEAN)]
    cases = []
    for place, pooling, uneven in itertools.product(places, poolings, (False, True)):
        case = Case(place, pooling, stock={"c": "dense"} if place[2] == "dp" else {}, uneven=uneven)
        cases += [case, replace(case, stock={**case.stock, "b": "fused"})]
        if pooling == (SUM, SUM, SUM):
            cases.append(replace(case, weighted=True))
            if place[2] != "dp":  # a replicated table steps with each backward here
                cases.append(replace(case, deferred=True, micro_batches=2))
                cases.append(replace(case, deferred=True, optimizer=CLIPPED))
    if num_hosts > 1:
        cases += [
            replace(case, dim=256, places=grid, stock=stock)
            for case in [Case(("tw0", "tw0", "tw0"), pooling, uneven=uneven) for pooling in poolings for uneven in (False, True)]
            for grid, stock in [
                (("grid", "grid", "grid"), {}),
                (("grid", "rw", "tw0"), {}),
                (("grid", "grid", "twrw_last"), {"b": "fused"}),
            ]
        ]
        cases.append(Case(("grid", "grid", "grid"), dim=256, optimizer=CLIPPED, deferred=True))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_the_whole_matrix(spawn_ranks: SpawnRanks, world_size: int, local_world_size: int) -> None:
    """As above, for every combination."""
    spawn_ranks(check_cases, world_size, local_world_size, args=(_matrix(world_size // local_world_size),), timeout_s=800)
