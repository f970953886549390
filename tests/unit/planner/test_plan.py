"""Plans for machines of any size, made in one process; what is refused and how it is told. Layer: unit."""

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.batches import make_schema
from torchrec_kstep.config.schema import ModelConfig, OptimConfig, PlannerConfig
from torchrec_kstep.errors import PlanError
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.planner import format_plan, placed_shards
from torchrec_kstep.planner.checks import leaves_empty_shards
from torchrec_kstep.planner.plan import find_tables, plan_alone
from torchrec_kstep.planner.report import check_tiling
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.units import GIB, MIB
from torchrec_kstep.world import World

META = torch.device("meta")
WORLDS = {"1x1": World(0, 1, 0, 1), "1x2": World(0, 2, 0, 2), "2x2": World(0, 4, 0, 2), "2x8": World(0, 16, 0, 8)}
# A plan for sixteen ranks takes seconds.
EACH_WORLD = [pytest.param(name, marks=pytest.mark.slow if name == "2x8" else ()) for name in WORLDS]
SHARDINGS = ("auto", "data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise")


def make_task(num_rows: list[int], dim: int = 16, pooling: str = "sum", name: str = "deepfm") -> nn.Module:
    config = ModelConfig(name=name, embedding_dim=dim, pooling=pooling, mlp=[8])
    return CTRTask(build_model(config, make_schema(num_rows), META), 1)


def bags(*tables: EmbeddingBagConfig) -> nn.Module:
    return nn.Sequential(EmbeddingBagCollection(tables=list(tables), device=META))


def plan(
    task: nn.Module, config: PlannerConfig, world: World, optim: OptimConfig | None = None, memory_bytes: int = 8 * GIB
) -> ShardingPlan:
    optim = optim or OptimConfig(embedding="adam" if config.kernel == "dense" else "adagrad")
    return plan_alone(task, config, world, build_sharders(config, optim), batch_size=64, memory_per_rank_bytes=memory_bytes)


@pytest.mark.parametrize("world", EACH_WORLD)
@pytest.mark.parametrize(
    ("sharding", "kernel"),
    [(sharding, kernel) for sharding in SHARDINGS for kernel in ("dense", "fused") if (sharding, kernel) != ("data_parallel", "fused")],
)
def test_shards_hold_every_element_once_on_ranks_that_exist(world: str, sharding: str, kernel: str) -> None:
    """Otherwise rows would be trained twice or nowhere; the type and kernel are the ones asked for (C48)."""
    task = make_task([1000, 160, 100_000], dim=32)
    tables = find_tables(task)
    found = plan(task, PlannerConfig(sharding=sharding, kernel=kernel), WORLDS[world])
    shards = placed_shards(found, tables)
    assert check_tiling(found, tables) == []
    assert {shard.table for shard in shards} == {f"{prefix}f{index}" for prefix in ("", "wide_") for index in range(3)}
    assert all(0 <= shard.rank < WORLDS[world].world_size for shard in shards)
    assert {shard.kernel for shard in shards} == {kernel}
    if sharding != "auto":
        assert {shard.sharding_type for shard in shards} == {sharding}
    if sharding == "table_row_wise":
        for name in {shard.table for shard in shards}:
            assert len({shard.rank // WORLDS[world].local_world_size for shard in shards if shard.table == name}) == 1, "rows of one host"
    if sharding == "column_wise":
        assert all(shard.num_columns % 4 == 0 for shard in shards)
        if world != "1x1":
            assert len([shard for shard in shards if shard.table == "f0"]) > 1, "a table that could be split was not"


def test_single_tables_can_be_given_a_type_of_their_own() -> None:
    """Otherwise a tiny table would have to be split because a large one is."""
    task = make_task([10_000, 5])
    found = plan(
        task, PlannerConfig(kernel="dense", sharding="row_wise", tables={"f1": "data_parallel", "wide_f0": "column_wise"}), WORLDS["2x2"]
    )
    types = {shard.table: shard.sharding_type for shard in placed_shards(found, find_tables(task))}
    assert types == {"f0": "row_wise", "f1": "data_parallel", "wide_f0": "column_wise", "wide_f1": "row_wise"}


def test_planning_twice_gives_the_same_plan() -> None:
    """Otherwise a resumed run might be laid out anew for no reason."""
    config = PlannerConfig(kernel="dense")
    first, second = (plan(make_task([50_000, 7, 900, 10, 123_456]), config, WORLDS["2x2"]) for _ in range(2))
    assert str(first) == str(second)


def test_many_tables_are_planned() -> None:
    """Otherwise the search over 200 tables would blow up (C47); the timeout of the test is the limit."""
    task = make_task([1000 + index for index in range(200)], name="dcn")
    assert len(placed_shards(plan(task, PlannerConfig(kernel="dense", sharding="table_wise"), WORLDS["2x8"]), find_tables(task))) == 200


def test_the_plan_reads_well() -> None:
    """Otherwise a user could not tell where rows are."""
    task = bags(
        EmbeddingBagConfig(name="user", feature_names=["u"], num_embeddings=10, embedding_dim=16),
        EmbeddingBagConfig(name="tag", feature_names=["t"], num_embeddings=6, embedding_dim=8),
        EmbeddingBagConfig(name="sex", feature_names=["s"], num_embeddings=3, embedding_dim=4),
    )
    config = PlannerConfig(kernel="dense", tables={"user": "row_wise", "tag": "column_wise", "sex": "data_parallel"})
    assert format_plan(plan(task, config, World(0, 4, 0, 4)), find_tables(task)).splitlines() == [
        "table  sharding       kernel  rank  rows   columns  weights",
        "user   row_wise       dense   0     0..3   0..16    192 B",
        "user   row_wise       dense   1     3..6   0..16    192 B",
        "user   row_wise       dense   2     6..9   0..16    192 B",
        "user   row_wise       dense   3     9..10  0..16    64 B",
        "tag    column_wise    dense   0     0..6   0..4     96 B",
        "tag    column_wise    dense   1     0..6   4..8     96 B",
        "sex    data_parallel  dense   all   0..3   0..4     48 B",
        "weights per rank: rank 0 336 B, rank 1 336 B, rank 2 240 B, rank 3 112 B",
    ]


# --- refusals ---


def mean(name: str, feature: str, rows: int = 100) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, feature_names=[feature], num_embeddings=rows, embedding_dim=8, pooling=PoolingType.MEAN)


def add(name: str, feature: str, rows: int = 100, dim: int = 8) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, feature_names=[feature], num_embeddings=rows, embedding_dim=dim)


@pytest.mark.parametrize("row_type", ["row_wise", "table_row_wise"])
@pytest.mark.parametrize("other_type", ["data_parallel", "table_wise", "column_wise"])
@pytest.mark.parametrize("other", [mean("b", "y"), add("b", "y")])
def test_row_sharded_averages_beside_other_types_are_refused(row_type: str, other_type: str, other: EmbeddingBagConfig) -> None:
    """Otherwise TorchRec divides the other tables by their bag sizes too, without a word."""
    with pytest.raises(PlanError, match=r"'a' is (table_)?row_wise with MEAN pooling beside b of other sharding types"):
        plan(bags(mean("a", "x"), other), PlannerConfig(kernel="dense", tables={"a": row_type, "b": other_type}), WORLDS["2x2"])


def test_a_feature_of_a_row_sharded_sum_and_mean_table_is_refused() -> None:
    """Otherwise TorchRec would not average it, without a word."""
    with pytest.raises(PlanError, match="feature 'x' is read by the row-sharded MEAN table 'a' and by a row-sharded SUM table"):
        plan(bags(mean("a", "x"), add("b", "x")), PlannerConfig(kernel="dense", sharding="row_wise"), WORLDS["1x2"])


@pytest.mark.parametrize(
    "tables", [{"a": "row_wise", "b": "row_wise"}, {"a": "table_wise", "b": "row_wise"}, {"a": "column_wise", "b": "data_parallel"}]
)
def test_averages_that_torchrec_gets_right_are_planned(tables: dict[str, str]) -> None:
    """Otherwise users would lose plans that work (the multiprocess tests compare their results)."""
    plan(bags(mean("a", "x"), add("b", "y")), PlannerConfig(kernel="dense", tables=tables), WORLDS["1x2"])


@pytest.mark.parametrize("kernel", ["dense", "fused"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("world", EACH_WORLD)
def test_auto_never_chooses_what_is_refused(kernel: str, pooling: str, world: str) -> None:
    """Otherwise the default would fail on ordinary data."""
    plan(make_task([1, 2, 3, 5, 17, 100_000], pooling=pooling), PlannerConfig(kernel=kernel), WORLDS[world])


@pytest.mark.parametrize(
    ("rows", "num_shards", "expected"), [(4, 4, False), (3, 4, True), (5, 4, True), (7, 4, False), (9, 4, True), (1, 1, False)]
)
def test_equal_row_blocks_may_leave_the_last_shards_empty(rows: int, num_shards: int, expected: bool) -> None:
    """Otherwise only tables with fewer rows than ranks would be caught: 5 rows on 4 ranks are 2 + 2 + 1 + 0."""
    assert leaves_empty_shards(rows, num_shards) == expected


@pytest.mark.parametrize("rows", [3, 5])
def test_fused_shards_without_rows_are_refused_and_dense_ones_are_not(rows: int) -> None:
    """Otherwise FBGEMM's fused CPU kernel fails in the first step, or updates rows of a neighbouring table."""
    task = bags(add("small", "x", rows), add("large", "y"))
    with pytest.raises(PlanError, match=r"table 'small' \(row_wise\) leaves rank 3 without a row.*planner.kernel=dense"):
        plan(task, PlannerConfig(sharding="row_wise", kernel="fused"), WORLDS["2x2"])
    plan(task, PlannerConfig(sharding="row_wise", kernel="dense"), WORLDS["2x2"])


@pytest.mark.parametrize(("dim", "suggestion"), [(1, 4), (3, 4), (6, 8), (1001, 1000), (2050, 2048)])
def test_columns_that_the_kernels_cannot_read_are_refused_with_the_next_best(dim: int, suggestion: int) -> None:
    """Otherwise they fail late, deep in FBGEMM (C16)."""
    with pytest.raises(PlanError, match=rf"table 't' has {dim} columns: .*multiple of 4; choose {suggestion}$"):
        plan(bags(add("t", "x", dim=dim)), PlannerConfig(kernel="dense"), WORLDS["1x1"])


def test_all_bad_requests_are_told_at_once() -> None:
    """Otherwise users would mend one fault per run."""
    task = nn.ModuleDict({"a": bags(add("t", "x", dim=3)), "b": bags(add("t", "x"))})
    with pytest.raises(PlanError) as error:
        plan(task, PlannerConfig(kernel="dense", sharding="rowwise", tables={"u": "row_wise", "t": "sideways"}), WORLDS["1x1"])
    text = str(error.value)
    assert "planner.sharding='rowwise': expected auto or one of data_parallel, table_wise" in text
    assert "planner.tables.u: there is no such table; the tables are t, t" in text
    assert "planner.tables.t='sideways': expected one of" in text
    assert "table 't' appears in 2 collections" in text
    assert "table 't' has 3 columns" in text


def test_a_task_without_tables_is_refused() -> None:
    """Otherwise an empty plan would be trained without a word."""
    with pytest.raises(PlanError, match="there is nothing to shard"):
        plan(nn.Linear(2, 2), PlannerConfig(kernel="dense"), WORLDS["1x1"])


def test_tables_that_fit_nowhere_are_told_with_sizes_and_ways_out() -> None:
    """Otherwise the message itself may crash, or name no table (C42)."""
    task = bags(add("big", "x", rows=2**24, dim=16), add("small", "y"))
    with pytest.raises(PlanError) as error:
        plan(task, PlannerConfig(kernel="dense", sharding="table_wise", engine="torchrec"), WORLDS["1x2"], memory_bytes=MIB)
    for text in ("2 tables", "1 GiB", "4 GiB with gradients", "2 ranks of 1 MiB", "largest table is 'big'", "planner.sharding=row_wise"):
        assert text in str(error.value)


@pytest.mark.parametrize("engine", ["topology", "torchrec"])
def test_optimizer_states_count_as_memory(engine: str) -> None:
    """Otherwise a plan that fits its weights would end in the kernel's out-of-memory killer."""
    task = bags(add("t", "x", rows=2**20, dim=16))  # 64 MiB of weights
    config, world = PlannerConfig(kernel="dense", sharding="table_wise", engine=engine), WORLDS["1x1"]
    plan(task, config, world, OptimConfig(embedding="sgd"), memory_bytes=200 * MIB)
    with pytest.raises(PlanError, match=r"256 MiB (with gradients and optimizer states|needed)"):
        plan(task, config, world, OptimConfig(embedding="adam"), memory_bytes=200 * MIB)
