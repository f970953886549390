"""`python -m torchrec_kstep.plan`: what it prints, writes and refuses. Layer: unit."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.checkout import ROOT
from torchrec_kstep import plan
from torchrec_kstep.errors import ConfigError

TABLES = ["--table", "rows=1e6,dim=64,ids=3,name=user", "--table", "rows=1e4,dim=16,count=3"]


def test_tables_on_a_described_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "plan.svg", tmp_path / "plan.json"
    status = plan.main(["--topology", "two_socket_cpu", "--ranks-per-host", "2", *TABLES, "--svg", str(picture), "--json", str(file)])
    told = capsys.readouterr().out
    assert status == 0, told
    assert "predicted step" in told
    assert "user" in told
    assert picture.read_text().startswith("<svg")
    values = json.loads(file.read_text())
    assert values["world_size"] == 8
    assert [table["name"] for table in values["tables"]] == ["user", "t1", "t2", "t3"]


@pytest.mark.parametrize("option", ["--json", "--svg"])
def test_a_file_that_cannot_be_written_is_told(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nowhere" / "a"
    assert plan.main(["--topology", "two_socket_cpu", *TABLES, option, str(file)]) == plan.EXIT_USAGE
    assert f"{option} {file}: cannot be written: No such file or directory" in capsys.readouterr().err


def test_what_if_compares_hosts_and_periods(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--topology", "two_socket_cpu", "--ranks-per-host", "2", "--hosts", "2,4", "--k", "0,20", *TABLES]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(index for index, line in enumerate(lines) if line.split()[:3] == ["hosts", "k", "ranks"])
    assert [line.split()[:3] for line in lines[header + 1 : header + 5]] == [
        ["2", "-", "4"],
        ["2", "20", "4"],
        ["4", "-", "8"],
        ["4", "20", "8"],
    ]


def test_the_run_of_train_is_planned_with_its_own_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["data=synthetic", "data.synthetic.num_train_rows=5000", "data.synthetic.num_eval_rows=100", "model=dlrm"]
    settings += ["data.synthetic.num_rows_per_table=[100,20000]", "planner=tiered", f"data.path={tmp_path / 'prepared'}"]
    assert plan.main(["--ranks-per-host", "2", *settings]) == 0
    told = capsys.readouterr().out
    assert "assumed, not measured" in told


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--topology", "dgx_h10", *TABLES], 1, "did you mean 'dgx_h100'"),
        (["--table", "rows=1e6"], 2, "expected rows=N,dim=N"),
        (["--table", "rows=1e6,dim=6"], 2, "a multiple of 4"),
        (["--table", "rows=1e6,dim=8", "model=dlrm"], 2, "leave out one of them"),
        (["modl=dlrm"], 2, "did you mean"),
        (["--topology", "small_cpu", "--table", "rows=1e11,dim=64"], 1, "short"),
    ],
)
def test_what_is_wrong_is_told_in_one_error(arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", ["rows=nan", "rows=inf", "rows=1e400", "rows=1e19", "dim=inf", "count=nan", "ids=nan", "ids=inf", "ids=0"]
)
def test_a_number_of_a_table_is_finite_and_in_range(values: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = ",".join(({"rows": "rows=1e6", "dim": "dim=8"} | {values.partition("=")[0]: values}).values())
    assert plan.main(["--table", table]) == 2
    assert f"--table {table}: expected whole rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (["rows=9,dim=8,name="], "expected some text without '.'"),
        (["rows=9,dim=8,name=a.b"], "expected some text without '.'"),
        (["rows=9,dim=8,name=../x"], "expected some text without '.'"),
        (["rows=9,dim=8,name=a", "rows=8,dim=8,name=a"], "table 'a' was given before"),
        (["rows=9,dim=8", "rows=8,dim=8,name=t0"], "table 't0' was given before"),
    ],
)
def test_a_table_has_a_name_of_its_own(tables: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([part for table in tables for part in ("--table", table)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--ranks-per-host"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", ""])
def test_a_count_of_nothing_is_not_the_default(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main([f"{option}={text}", *TABLES])
    assert f"argument {option}: expected a whole number of at least 1, got {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "much"])
def test_an_exponent_is_finite_and_not_negative(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main([f"--zipf={text}", *TABLES])
    assert f"argument --zipf: expected a finite number not below 0, got {text!r}" in capsys.readouterr().err


def test_a_table_of_words() -> None:
    assert [(config.name, config.num_embeddings, ids) for config, ids in plan.parse_table("rows=1e3,dim=8,count=2,ids=2.5", 4)] == [
        ("t4", 1000, 2.5),
        ("t5", 1000, 2.5),
    ]
    with pytest.raises(ConfigError):
        plan.parse_table("rows=x,dim=8", 0)


def test_what_if_there_were_sixteen_hosts_that_merge_every_twenty_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """`--k 20 --hosts 16`: its rounds cost something but less than sharing one model."""
    tables = ["--table", "rows=2e6,dim=64,ids=2,count=8"]
    assert plan.main(["--topology", "two_socket_cpu", "--hosts", "16", "--k", "20", "--ranks-per-host", "2", *tables]) == 0
    merged = capsys.readouterr().out
    assert "merge rounds, spread over their steps" in merged
    assert plan.main(["--topology", "two_socket_cpu", "--hosts", "16", "--k", "0,20", "--ranks-per-host", "2", *tables]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(index for index, line in enumerate(lines) if line[:3] == ["hosts", "k", "ranks"])
    shared, every_twenty = lines[header + 1], lines[header + 2]
    assert shared[:3] == ["16", "-", "32"]
    assert every_twenty[:3] == ["16", "20", "32"]


def test_explanations_name_table_tier_hits_and_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Why a table goes to SSD: the reason is the share of ids that its cache meets, and the reads that are left."""
    arguments = ["--topology", "small_cpu", "--dram", "200MiB", "--table", "rows=3e6,dim=32,ids=1,name=rare"]
    assert plan.main([*arguments, "--table", "rows=2e5,dim=32,ids=20,name=hot"]) == 0
    told = capsys.readouterr().out
    line = next(text for text in told.splitlines() if text.startswith("- rare goes to SSD"))
    assert "rows cached" in line
    assert "of its ids" in line
    assert "rows per step" in line
    assert "- hot stays in dram" in told or "- hot goes to SSD" in told


def test_a_table_that_no_host_holds_is_told_with_bytes_and_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--topology", "small_cpu", "--table", "rows=4e9,dim=16,name=huge"]) == 1
    said = capsys.readouterr().err
    for part in ("'huge'", "short", "needed", "usable", "what would make it fit"):
        assert part in said


def test_the_readme_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise its words and its picture would be of a planner of the past."""
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"^\.venv/bin/python -m torchrec_kstep\.plan (.*)$", readme, re.MULTILINE)
    assert command is not None
    shown = re.search(r"```text\n(.*?)```", readme[command.end() :], re.DOTALL)
    assert shown is not None
    picture = tmp_path / "plan.svg"
    assert plan.main([str(picture) if word == "plan.svg" else word for word in shlex.split(command.group(1))]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for paragraph in re.split(r"\n(?=\S)", shown.group(1).strip()):
        assert " ".join(paragraph.split()) in printed
    assert picture.read_text() == (ROOT / "docs" / "plan.svg").read_text()
