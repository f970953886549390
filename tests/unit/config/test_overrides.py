"""Overrides on the command line: every way to mistype one is refused with a near match, and all at once."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from torchrec_kstep.config.check import Checker
from torchrec_kstep.config.command import parse_command
from torchrec_kstep.config.findings import Findings
from torchrec_kstep.config.keys import schema_keys
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import PrepareConfig, RunConfig
from torchrec_kstep.errors import ConfigError

GROUPS = {"data": ["frappe"], "model": ["dcn", "deepfm", "dlrm"], "experiment": ["quick"], "hardware": ["laptop"]}
OFFERED = {"data": (), "model": (), "experiment": ()}


def faults_of(*overrides: str, schema_cls: type = RunConfig) -> list[str]:
    """Faults that the check of overrides finds, without composing."""
    findings = Findings()
    checker = Checker(schema_cls, GROUPS, OFFERED, findings)
    checker.check_overrides(overrides)
    checker.apply_overrides()
    return [item.text for item in findings.items]


def refusal(*argv: str, schema_cls: type = RunConfig, name: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load(schema_cls, name, argv)
    return str(caught.value)


# --- unknown keys ---


@pytest.mark.parametrize("form", ["{}=4", "+{}=4", "++{}=4", "~{}", "~{}=4", "{}=[1]", "{}={{a:1}}", "{}=''", "{}=1,2"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.lrr", "optim.lr"),
        ("train.epoch", "train.epochs"),
        ("epochs", "train.epochs"),
        ("modle", "model"),
        ("data.synthetic.num_dens", "data.synthetic.num_dense"),
        ("hydra.ouput_subdir", "hydra.output_subdir"),
        ("hydra.job.chdr", "hydra.job.chdir"),
    ],
)
def test_an_unknown_key_is_refused_with_a_near_match_in_every_form(form: str, wrong: str, right: str) -> None:
    override = form.format(wrong)
    [fault] = faults_of(override)
    assert override in fault
    assert f"did you mean {right!r}?" in fault


def test_a_key_unlike_any_is_refused_with_the_keys_of_its_group() -> None:
    [fault] = faults_of("+optim.tau=4")
    assert "unknown key 'optim.tau'" in fault
    assert "did you mean" in fault
    assert "keys of optim: dense, embedding, lr" in fault


EDITED = st.sampled_from("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789_./@-")


@st.composite
def single_edits(draw: st.DrawFn, schema_cls: type) -> str:
    """A real key with one character inserted, deleted, replaced, or swapped with its neighbour."""
    key = draw(st.sampled_from(sorted(schema_keys(schema_cls).leaves)))
    at = draw(st.integers(0, len(key) - 1))
    kind = draw(st.sampled_from(["insert", "delete", "replace", "swap"]))
    if kind == "insert":
        return key[:at] + draw(EDITED) + key[at:]
    if kind == "delete":
        return key[:at] + key[at + 1 :]
    if kind == "replace":
        return key[:at] + draw(EDITED) + key[at + 1 :]
    return key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :]


@given(edited=st.one_of(single_edits(RunConfig), single_edits(PrepareConfig)), prefix=st.sampled_from(["", "+", "++", "~"]))
def test_any_edit_of_one_character_of_any_key_is_refused(edited: str, prefix: str) -> None:
    """Nothing but a real key passes; what lies inside the open mapping `planner.tables` is a name of the user's own."""
    assume(not schema_keys(RunConfig).knows(edited))
    faults = faults_of(f"{prefix}{edited}=1")
    assert len(faults) == 1
    assert "unknown key" in faults[0] or "cannot be read" in faults[0] or "is not used here" in faults[0]


@given(edited=single_edits(RunConfig))
@example(edited="kstep.a")
def test_an_edited_key_is_answered_with_a_near_match(edited: str) -> None:
    assume(not schema_keys(RunConfig).knows(edited) and "/" not in edited and "@" not in edited)
    faults = faults_of(f"{edited}=1")
    is_nothing_alike = len(edited.rpartition(".")[2]) == 1  # the whole of `k` in `kstep.k` is another letter
    answers = ("did you mean", "cannot be read", *(["keys of kstep: k, "] if is_nothing_alike else []))
    assert any(answer in faults[0] for answer in answers)


# --- real keys in a wrong form ---


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+optim.lr=1", "'+' adds a new key, and optim.lr exists; write optim.lr=1"),
        ("~optim.lr", "optim.lr cannot be removed"),
        ("~model", "group model cannot be removed"),
        ("+model=dcn", "write model=dcn"),
        ("++model=dcn", "write model=dcn"),
        ("++experiment=quick", "write experiment=quick"),
        ("hardware=laptop", "write +hardware=laptop"),
        ("model=dcm", "no model is named 'dcm'; did you mean 'dcn'?"),
        ("model=null", "no model is named None"),
        ("model=[dcn,dlrm]", "--multirun and model=dcn,dlrm"),
        ("experiment=[quick,qick]", "no experiment is named 'qick'"),
        ("model@optim=dcn", "a package (@optim) is not used here"),
        ("optim.lr=1,2", "several values need --multirun"),
        ("model=dcn,dlrm", "several values need --multirun"),
        ("hydra.run.dir=x", "has no effect here; write run_dir=FOLDER"),
        ("hydra/launcher=joblib", "hydra.launcher has no effect here"),
        ("hydra.searchpath=[a]", "use --config-dir"),
        ("optim=3", "optim is a group of keys, got 3; keys of optim: dense"),
        ("data.synthetic=3", "data.synthetic is a group of keys, got 3"),
        ("model={nam: dcn}", "unknown key 'model.nam'; did you mean 'model.name'?"),
        ("a b", "expected key=value"),
        ("optim.lr", "expected key=value"),
        ("run_dir=~/a", "if the value is right, quote it: 'run_dir=\"~/a\"'"),
        ("run_dir=a, b)", "cannot be read"),
    ],
)
def test_a_real_name_in_a_wrong_form_is_refused_with_the_right_one(override: str, says: str) -> None:
    [fault] = faults_of(override)
    assert override in fault
    assert says in fault


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=ten", "a whole number, got 'ten'"),
        ("train.epochs=1.5", "a whole number, got 1.5"),
        ("train.epochs=true", "a whole number, got True"),
        ("train.epochs=null", "a whole number, got None"),
        ("train.epochs=[1]", "a whole number, got [1]"),
        ("optim.lr=fast", "a number, got 'fast'"),
        ("data.shuffle=3", "true or false, got 3"),
        ("data.shuffle=maybe", "true or false, got 'maybe'"),
        ("hydra.job.chdir=ture", "true or false, got 'ture'"),
        ("model.name=[dcn]", "text, got ['dcn']"),
        ("model.mlp=256", "a list in brackets, each item a whole number, got 256"),
        ("model.mlp=[1,x]", "a list in brackets, each item a whole number, got [1, 'x']"),
        ("model.mlp={a:1}", "a list in brackets, each item a whole number, got {'a': 1}"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_type_and_the_meaning(override: str, expected: str) -> None:
    [fault] = faults_of(override)
    assert f"expects {expected} (" in fault


def test_hydra_chdir_needs_a_run_directory() -> None:
    assert faults_of("hydra.job.chdir=true") == []
    assert "has no run directory" in faults_of("hydra.job.chdir=true", schema_cls=PrepareConfig)[0]


# --- through Hydra ---


def test_overrides_reach_the_configuration() -> None:
    config = load(RunConfig, "train", ["model=dcnv2", "++optim.lr=3e-3", "model.mlp=[8,4]", "data={limit: 5}", "hydra.job.chdir=true"])
    assert config.model.name == "dcnv2"
    assert config.optim.lr == 3e-3
    assert config.model.mlp == [8, 4]
    assert type(config.model.mlp) is list
    assert config.data.limit == 5
    assert config.chdir is True


def test_names_inside_a_mapping_are_free_and_need_no_plus() -> None:
    argv = ["planner.tables={a: row_wise}", "planner.tables.b=table_wise", "+planner.tables.c=row_wise"]
    assert load(RunConfig, "train", argv).planner.tables == {"a": "row_wise", "b": "table_wise", "c": "row_wise"}


def test_the_last_of_two_equal_overrides_counts() -> None:
    assert load(RunConfig, "train", ["train.epochs=1", "train.epochs=2"]).train.epochs == 2


def test_an_experiment_can_be_chosen_dropped_and_overridden() -> None:
    assert load(RunConfig, "train", ["experiment=frappe_deepfm"]).data.name == "frappe"
    assert load(RunConfig, "train", ["experiment=frappe_deepfm", "data=movielens_1m"]).data.name == "movielens_1m"
    assert load(RunConfig, "train", ["experiment=frappe_deepfm", "train.batch_size=7"]).train.batch_size == 7
    assert load(RunConfig, "train", ["~experiment"]) == load(RunConfig, "train", [])


def test_groups_of_another_program_are_unknown() -> None:
    assert "unknown key 'model'" in refusal("model=dcn", schema_cls=PrepareConfig, name="prepare")


def test_all_faults_of_one_call_stand_in_one_error() -> None:
    text = refusal(
        "optim.kstp=4",
        "+train.epoch=3",
        "model=depfm",
        "train.epochs=ten",
        "train.batch_size=0",
        "hydra.ouput_subdir=x",
        "--mutlirun",
        "data.path=${nope}",
        "planner.kernel=fused",
    )
    assert text.startswith("9 faults in the configuration:")
    for expected in (
        "unknown key 'optim.kstp'",
        "did you mean 'train.epochs'?",
        "did you mean 'deepfm'?",
        "train.epochs expects a whole number",
        "train.batch_size: expected at least 1 and at most 16777216, got 0",
        "did you mean 'hydra.output_subdir'?",
        "did you mean --multirun?",
        "data.path: Interpolation key 'nope' not found",
        "FBGEMM has no Adam on CPU",
    ):
        assert expected in text


def test_a_rule_over_several_keys_is_not_told_of_a_key_that_was_mistyped() -> None:
    """With `optim.embeding=sgd` meant for `optim.embedding`, the default Adam beside fused kernels is only an echo."""
    text = refusal("planner.kernel=fused", "optim.embeding=sgd")
    assert "did you mean 'optim.embedding'?" in text
    assert text.startswith("1 fault")


@pytest.mark.parametrize("option", ["--mutlirun", "--cofig-dir=x", "--hepl"])
def test_an_unknown_option_is_refused_with_a_near_match(option: str) -> None:
    [fault] = parse_command([option, "optim.lr=1"]).faults
    assert "did you mean --" in fault


def test_an_option_of_hydra_alone_says_what_to_use_instead() -> None:
    assert "--help lists" in parse_command(["--hydra-help"]).faults[0]


def test_an_option_without_its_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--config-name"):
        parse_command(["--config-name"])


def test_overrides_keep_their_order_around_options() -> None:
    command = parse_command(["a=1", "-m", "b=2", "--config-name", "x.yaml", "~c"])
    assert command.overrides == ("a=1", "b=2", "~c")
    assert command.multirun
    assert command.config_name == "x"
