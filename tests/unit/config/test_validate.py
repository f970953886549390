"""Values: every key with a rule keeps it, rules over several keys give their reason, all findings come together."""

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.config.toy import OptimToy, Toy
from torchrec_kstep.config.keys import Key, schema_keys
from torchrec_kstep.config.schema import DataConfig, PrepareConfig, RunConfig
from torchrec_kstep.config.validate import BOUNDS, CHOICES, Bounds, check, findings
from torchrec_kstep.errors import ConfigError

KEYS = schema_keys(RunConfig).leaves


def with_value(config: object, path: str, value: object) -> object:
    """The configuration with one key replaced."""
    name, _, rest = path.partition(".")
    inner = with_value(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: inner})  # type: ignore[type-var]


def with_values(values: dict[str, object], config: object | None = None) -> object:
    config = config or RunConfig()
    for path, value in values.items():
        config = with_value(config, path, value)
    return config


def texts(config: object) -> list[str]:
    return [finding.text for finding in findings(config)]


@pytest.mark.parametrize("schema_cls", [RunConfig, PrepareConfig])
def test_the_defaults_are_right(schema_cls: type) -> None:
    check(schema_cls())


def is_number(key: Key) -> bool:
    return key.type in (int, float, list[int], list[float])


def test_every_number_has_bounds_and_no_rule_is_for_nothing() -> None:
    assert {path for path, key in KEYS.items() if is_number(key)} == BOUNDS.keys()
    assert CHOICES.keys() <= KEYS.keys()


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.type is str])
def test_the_comment_of_a_key_lists_its_choices(path: str) -> None:
    """`a | b | c`, then perhaps `: meaning`; or `a: meaning; b: meaning`."""
    comment = KEYS[path].comment
    listed = re.match(r"\w+( \| \w+)+", comment)
    explained = re.findall(r"(?:^|; )(\w+):", comment)
    if listed:
        assert tuple(listed.group().split(" | ")) == CHOICES[path]
    elif path in CHOICES:
        assert tuple(explained) == CHOICES[path]


@pytest.mark.parametrize("path", CHOICES)
def test_a_value_that_is_no_choice_is_refused_with_a_near_match(path: str) -> None:
    right = CHOICES[path][0]
    wrong: object = {"user": right[:-1]} if KEYS[path].type == dict[str, str] else right[:-1]
    [text] = texts(with_values({path: wrong}))
    assert text.startswith(f"{path}: {right[:-1]!r} is no choice; did you mean {right!r}?")


@pytest.mark.parametrize("path", BOUNDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1])
def test_a_number_out_of_its_bounds_is_refused(path: str, wrong: float) -> None:
    value: object = [wrong] if KEYS[path].default.__class__ is list else wrong
    [text] = texts(with_values({path: value}))
    finite = "" if math.isfinite(wrong) else "a finite number "  # infinity is at least 0, too
    assert text.startswith(f"{path}: expected {finite}{BOUNDS[path]}, got {wrong}")


@given(
    low=st.integers(-5, 5),
    width=st.integers(0, 5),
    value=st.floats(-11, 11),
    includes_low=st.booleans(),
    includes_high=st.booleans(),
)
def test_bounds_hold_as_the_words_say(low: int, width: int, value: float, includes_low: bool, includes_high: bool) -> None:
    bounds = Bounds(low, low + width, includes_low, includes_high)
    inside = low < value < low + width
    at_end = (value == low and includes_low) or (value == low + width and includes_high)
    if value != low or value != low + width:
        assert bounds.holds(value) == (inside or at_end)
    assert ("at least" in str(bounds)) is includes_low
    assert ("at most" in str(bounds)) is includes_high


def test_names_of_a_list_must_differ() -> None:
    """The later of two equal names would replace the earlier without a word."""
    [text] = texts(Toy(columns=["C1", "C2", "C1", "C1"]))
    assert text == "columns: 'C1' stands 3 times; names must differ (names of the columns)"
    assert texts(Toy(widths=[4, 4], rules={"a": "x", "b": "x"})) == []


def test_numbers_without_bounds_must_still_be_finite() -> None:
    [text] = texts(Toy(optim=OptimToy(pace=math.nan)))
    assert text.startswith("optim.pace: expected a finite number, got nan")


TIERED = {"planner.kernel": "tiered"}
SSD = {**TIERED, "tiers.name": "dram_ssd"}
FUSED = {"planner.kernel": "fused", "optim.embedding": "adagrad"}
DENSE = {"planner.kernel": "dense"}
RULES: list[tuple[dict[str, object], str]] = [
    ({"planner.kernel": "fused"}, "FBGEMM has no Adam on CPU"),
    ({**FUSED, "train.accumulation": 2}, "each micro-batch would be a step of its own"),
    ({**FUSED, "optim.embedding_l2": 0.1}, "sees touched rows only"),
    ({**FUSED, "optim.clip_norm": 1.0, "optim.clip_covers": "all"}, "before the norm of the gradient is known"),
    ({**FUSED, "planner.sharding": "data_parallel"}, "planner.sharding=data_parallel"),
    ({**FUSED, "planner.tables": {"user": "data_parallel"}}, "planner.tables.user=data_parallel"),
    ({**DENSE, "optim.embedding": "rowwise_adagrad"}, "torch.optim has no row-wise Adagrad"),
    ({**DENSE, "model.embedding_dim": 10}, "a multiple of 4 columns; choose 12"),
    ({"train.max_steps": 5, "optim.warmup_steps": 6}, "the warm-up would never end"),
    ({"distributed.backend": "nccl"}, "NCCL moves CUDA tensors only"),
    ({**DENSE, "tiers.name": "dram_ssd", "tiers.ssd_paths": ["rows"]}, "only tiered tables use tiers; choose planner=tiered"),
    ({**TIERED, "tiers.name": "dram_ssd", "tiers.ssd_paths": ["rows"], "tiers.lookahead": 1}, "is less than tiers.prefetch_depth=2"),
    ({**SSD, "tiers.dram_bytes": "0"}, "tiers.dram_bytes: cannot read '0' as a size"),
    ({**SSD, "tiers.segment_bytes": "1KiB"}, "tiers.segment_bytes=1KiB: expected 64 KiB to 1 GiB"),
    ({**SSD, "tiers.ssd_bytes": "much"}, "tiers.ssd_bytes: cannot read 'much' as a size"),
    ({**SSD, "tiers.ssd_bytes": "128MiB"}, "at least 4 segments, 256 MiB; raise the one or lower the other"),
    ({**SSD, "tiers.ssd_paths": [f"d{index}" for index in range(17)]}, "17 folders, expected at most 16"),
    ({**TIERED, "optim.embedding": "adagrad"}, "row-wise Adagrad only"),
    ({**TIERED, "optim.embedding": "adagrad", "kstep.k": 20}, "kstep.k=20 with optim.embedding=adagrad"),
    ({**TIERED, "train.device": "cuda"}, "rows are looked up on the CPU"),
    ({**TIERED, "planner.sharding": "data_parallel"}, "planner.sharding=data_parallel: rows in tiers have one owner"),
    ({**TIERED, "planner.tables": {"user": "data_parallel"}}, "planner.tables.user=data_parallel: rows in tiers have one owner"),
    ({**TIERED, "optim.embedding": "rowwise_adagrad", "planner.sharding": "column_wise"}, "mean over all columns of a row"),
    ({"optim.scaling": "sqrt"}, "name the rows per step for which the rates were tuned"),
    ({**DENSE, "optim.clip": "cowclip"}, "no row-wise clip; choose planner=tiered"),
    ({**FUSED, "optim.clip": "cowclip"}, "FBGEMM's COWCLIP is another rule"),
    ({"data.validation_fraction": 0.5, "data.test_fraction": 0.5}, "leave no rows to train on"),
    ({"data.name": "synthetic", "data.synthetic.num_rows_per_table": []}, "at least one table"),
]


def test_all_wrong_sizes_of_tiers_are_told_at_once() -> None:
    """They used to be told one by one, after ranks had met."""
    sizes = {"tiers.dram_bytes": "0", "tiers.segment_bytes": "1KiB", "tiers.ssd_bytes": "4", "tiers.prefetch_depth": 2000}
    assert len(texts(with_values({**SSD, **sizes}))) == 4


@pytest.mark.parametrize(("values", "says"), RULES, ids=[says for _, says in RULES])
def test_values_that_do_not_go_together_are_refused_with_the_reason(values: dict[str, object], says: str) -> None:
    [text] = texts(with_values(values))
    assert says in text


@pytest.mark.parametrize(
    "values",
    [
        FUSED,
        {**FUSED, "optim.embedding": "rowwise_adagrad"},
        {**FUSED, "optim.clip_norm": 1.0},
        {**TIERED, "optim.clip_norm": 1.0, "optim.clip_covers": "all"},
        {**DENSE, "train.accumulation": 4, "optim.embedding_l2": 0.1, "planner.sharding": "data_parallel"},
        {"train.max_steps": 6, "optim.warmup_steps": 6},
        {**DENSE, "distributed.backend": "nccl", "train.device": "cuda"},
        {"model.mlp": []},
        {**TIERED, "optim.clip": "cowclip", "optim.scaling": "cowclip", "optim.base_batch_size": 32},
        {**TIERED, "optim.clip": "cowclip", "planner.sharding": "column_wise"},
        {**TIERED, "optim.clip": "cowclip", "planner.tables": {"user": "column_wise"}},
        {**TIERED, "train.accumulation": 4, "optim.embedding_l2": 0.1, "planner.tables": {"user": "column_wise"}},
        {**TIERED, "tiers.name": "dram_ssd", "tiers.ssd_paths": ["rows"], "optim.embedding": "rowwise_adagrad"},
        {**TIERED, "tiers.name": "dram_ssd"},
    ],
)
def test_values_that_go_together_pass(values: dict[str, object]) -> None:
    assert texts(with_values(values)) == []


def test_rules_of_the_data_hold_for_prepare_too() -> None:
    config = PrepareConfig(data=DataConfig(validation_fraction=0.6, test_fraction=0.6))
    assert len(texts(config)) == 1


def test_a_value_wrong_by_itself_is_told_once() -> None:
    """`planner.kernel=fuzed` must not also be judged beside Adam; `accumulation=0` not beside fused kernels."""
    assert len(texts(with_values({"planner.kernel": "fuzed"}))) == 1
    assert len(texts(with_values({**FUSED, "train.accumulation": 0}))) == 1


def test_all_findings_stand_in_one_error() -> None:
    config = with_values({"train.batch_size": 0, "model.name": "depfm", "model.embedding_dim": 6, "planner.kernel": "fused"})
    with pytest.raises(ConfigError, match=r"(?s)4 faults.*'depfm' is no choice.*train.batch_size.*multiple of 4.*no Adam on CPU"):
        check(config)
