"""The README is true: its Python runs, its commands run as written, its links lead somewhere.

Fast: the Python example trains, and every command line is parsed by the program it calls. Slow: all shell blocks are run in
order in a fresh copy of the checkout, in a folder with a space in its name, with nothing installed. That needs the package
index, and a real `make test` is cut down to one file, since the full one is running this.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_checkout
from torchrec_kstep.config import schema
from torchrec_kstep.config.load import load

README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")])
ENTRIES = {"torchrec_kstep.train": ("train", schema.RunConfig), "torchrec_kstep.prepare": ("prepare", schema.PrepareConfig)}
BY_HAND = "bash by-hand"


def blocks(language: str) -> list[str]:
    """Fenced blocks whose info string is exactly `language`."""
    return [body for info, body in re.findall(r"^```([^\n]*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if info.strip() == language]


def commands(language: str) -> list[list[str]]:
    """The words of each command line, comments dropped."""
    return [words for block in blocks(language) for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    infos = {info.strip() for info in re.findall(r"^```([^\n]*)\n.*?^```", README, re.MULTILINE | re.DOTALL)}
    assert infos == {"python", "bash", BY_HAND, "text"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_example_trains(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[number])
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    auc = re.fullmatch(r"test AUC (0\.\d{4})", result.stdout.splitlines()[-1])
    assert auc, result.stdout
    assert float(auc.group(1)) > 0.7


def test_the_python_example_is_short() -> None:
    body = [line for line in blocks("python")[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(body) <= 22


def starts() -> dict[str, list[str]]:
    """Lines in fenced blocks of all documents that start the trainer or the preparation; `$` marks a transcript of a fault."""
    found = {}
    for document in DOCUMENTS:
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if re.search(r"-m torchrec_kstep\.(train|prepare)\b", line) and not line.startswith("$"):
                    found[f"{document.name}: {line}"] = shlex.split(line, comments=True)
    return found


@pytest.mark.parametrize("words", starts().values(), ids=starts().keys())
def test_every_command_line_is_understood(words: list[str]) -> None:
    at = words.index("-m") + 1
    entry, kind = ENTRIES[words[at]]
    arguments = [word for word in words[at + 1 :] if word not in ("--cfg", "job", "--multirun")]
    if "--multirun" in words:  # the first of the runs
        arguments = [word if "[" in word else word.partition(",")[0] for word in arguments]
    assert isinstance(load(kind, entry, arguments), kind)


@pytest.mark.parametrize("target", sorted({words[1] for words in commands("bash") if words[0] == "make"}))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (document.parent / target).exists()] == []


def shell(line: str, cwd: Path, timeout_s: float, **environ: str) -> str:
    """Runs one line as a user would type it."""
    env = {name: value for name, value in os.environ.items() if name not in ("ARGS", "PYTHONPATH", "VIRTUAL_ENV")}
    command = ["bash", "-c", line]
    result = subprocess.run(command, cwd=cwd, env={**env, **environ}, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, f"{line}\n{result.stdout[-5000:]}\n{result.stderr[-5000:]}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_commands_run_in_order_on_a_fresh_copy(tmp_path: Path) -> None:
    copy = copy_checkout(tmp_path / "a fresh copy")
    for block in blocks("bash"):
        for line in block.splitlines():
            environ = {"ARGS": "tests/unit/test_units.py"} if line.startswith("make test") else {}
            printed = shell(line, copy, 1500, **environ)
            if ("torchrec_kstep.train" in line and "--cfg" not in line) or line.startswith("make train"):
                assert re.fullmatch(r"test AUC 0\.\d{4}", printed.splitlines()[-1]), printed
            if line.startswith("make train"):
                assert float(printed.split()[-1]) >= 0.775


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_installing_by_hand_gives_a_program_that_starts(tmp_path: Path) -> None:
    copy = copy_checkout(tmp_path / "by hand")
    for block in blocks(BY_HAND):
        shell("set -e\n" + block, copy, 1500)
    assert "optim" in shell(".venv/bin/python -m torchrec_kstep.train --cfg job", copy, 100)
