"""The check that shards tile a table, against plans made wrong on purpose. Layer: unit, property."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import EmbeddingModuleShardingPlan, EnumerableShardingSpec, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.planner.report import check_tiling

Rectangle = tuple[int, int, int, int]  # row, column, rows, columns


def tile_faults(rows: int, columns: int, rectangles: list[Rectangle]) -> list[str]:
    """Checks a plan of one table, one rectangle per rank."""
    shards = [
        ShardMetadata(shard_offsets=[row, column], shard_sizes=[num_rows, num_columns], placement=f"rank:{rank}/cpu")
        for rank, (row, column, num_rows, num_columns) in enumerate(rectangles)
    ]
    module_plan = EmbeddingModuleShardingPlan()
    spec = _AsGiven(shards)
    module_plan["t"] = ParameterSharding("row_wise", "dense", ranks=list(range(len(shards))), sharding_spec=spec)
    table = EmbeddingBagConfig(name="t", feature_names=["f"], num_embeddings=rows, embedding_dim=columns)
    return check_tiling(ShardingPlan({"m": module_plan}), {"m": [table]})


class _AsGiven(EnumerableShardingSpec):
    """A spec that does not check its shards, as a plan from elsewhere may not have been."""

    def __post_init__(self) -> None:
        """Skips torch's own check."""


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, int, list[Rectangle]]:
    """Cuts a table into rows, each of these into columns of its own."""
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    rectangles = []
    for top, bottom in pairwise(cuts):
        edges = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=2))})
        rectangles += [(top, left, bottom - top, right - left) for left, right in pairwise(edges)]
    return rows, columns, draw(st.permutations(rectangles))


@given(tilings(), st.integers(0, 2))
def test_a_tiling_has_no_fault_also_with_empty_shards(tiling: tuple[int, int, list[Rectangle]], num_empty: int) -> None:
    """Otherwise good plans would be refused."""
    rows, columns, rectangles = tiling
    assert tile_faults(rows, columns, [*rectangles, *[(rows, 0, 0, columns)] * num_empty]) == []


@given(tilings(), st.data())
def test_any_change_of_a_tiling_is_a_fault(tiling: tuple[int, int, list[Rectangle]], data: st.DataObject) -> None:
    """Otherwise a row without a home, or with two, would be trained silently wrong."""
    rows, columns, rectangles = tiling
    index = data.draw(st.integers(0, len(rectangles) - 1))
    row, column, num_rows, num_columns = rectangles[index]
    changed = data.draw(
        st.sampled_from(
            [
                [],
                [(row, column, num_rows, num_columns)] * 2,
                [(row + 1, column, num_rows, num_columns)],
                [(row, column + 1, num_rows, num_columns)],
                [(row, column, num_rows + 1, num_columns)],
                [(row, column, num_rows - 1, num_columns)],
                [(row, column, num_rows, num_columns + 1)],
            ]
        )
    )
    assert tile_faults(rows, columns, rectangles[:index] + changed + rectangles[index + 1 :])


def test_a_missing_table_and_a_rank_named_twice_are_faults() -> None:
    """Otherwise a table could silently fall out of the plan (C45)."""
    table = EmbeddingBagConfig(name="t", feature_names=["f"], num_embeddings=4, embedding_dim=4)
    assert check_tiling(ShardingPlan({}), {"m": [table]}) == ["table 't' of 'm' is missing from the plan"]
    module_plan = EmbeddingModuleShardingPlan()
    module_plan["t"] = ParameterSharding("data_parallel", "dense", ranks=[0, 1, 1])
    assert check_tiling(ShardingPlan({"m": module_plan}), {"m": [table]}) == [
        "table 't' is replicated on ranks [0, 1, 1]: a rank appears twice"
    ]
