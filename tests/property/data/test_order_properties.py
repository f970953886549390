"""Goal: reading lane after lane takes the rows that the order says, for every cut. Layer: order of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.data.order import InTurn, Merged


def check(rows: InTurn | Merged, num_lane_rows: list[int], begin: int, end: int, max_blocks: int) -> None:
    found = [block.indices() for block in rows.blocks(begin, end)]
    assert len(found) <= max_blocks
    assert all(len(indices) for indices in found)
    taken = np.concatenate([np.empty(0, dtype=np.int64), *found])
    assert (np.diff(taken) > 0).all(), "lane after lane, each from front to back"
    assert sorted(rows.indices()[begin:end].tolist()) == taken.tolist()
    assert sorted(rows.indices().tolist()) == list(range(sum(num_lane_rows)))


@given(num_lanes=st.integers(1, 9), rows_per_lane=st.integers(1, 20), data=st.data())
def test_a_stretch_of_a_turn_is_three_rectangles_at_most(num_lanes: int, rows_per_lane: int, data: st.DataObject) -> None:
    rows = InTurn(num_lanes, num_lanes * rows_per_lane)
    begin = data.draw(st.integers(0, len(rows)))
    check(rows, [rows_per_lane] * num_lanes, begin, data.draw(st.integers(begin, len(rows))), 3)


@given(num_lane_rows=st.lists(st.integers(1, 3000), min_size=1, max_size=6), seed=st.integers(0, 9), data=st.data())
def test_a_stretch_of_a_merge_is_a_run_of_each_lane_at_most(num_lane_rows: list[int], seed: int, data: st.DataObject) -> None:
    lanes = np.repeat(np.arange(len(num_lane_rows), dtype=np.uint16), num_lane_rows)
    rows = Merged(np.random.default_rng(seed).permutation(lanes), num_lane_rows)
    begin = data.draw(st.integers(0, len(rows)))
    check(rows, num_lane_rows, begin, data.draw(st.integers(begin, len(rows))), len(num_lane_rows))
