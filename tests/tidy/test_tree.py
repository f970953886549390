"""The shape of the tree, checked like any other behaviour: sizes, words, documentation, borders between rooms."""

import ast
import configparser
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = {".py", ".cpp", ".h"}
TEXT = CODE | {".md", ".yaml", ".yml", ".toml", ".cfg", ".txt", ".in", ".sh", ""}
MAX_LINES = 600

# An absolute path into somebody's machine: below a folder where people keep their own things, or below any other folder that
# stands at the root of the machine that runs this test. Folders of the system mean the same everywhere and pass; so do made-up ones.
PATH_START = re.compile(r"""(?<![\w.~/$}>)*\]{\-:])/([A-Za-z_][\w.-]*)/(?=[\w.-])""")
PRIVATE_FOLDERS = {"home", "Users", "root", "opt", "srv", "workspace"}
SYSTEM_FOLDERS = {"bin", "boot", "dev", "etc", "lib", "lib64", "media", "mnt", "proc", "run", "sbin", "sys", "tmp", "usr", "var"}

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")
STOREHOUSES = re.compile(r"https?://(?:download\.|files\.|test\.)?(?:py(?:pi|thonhosted|torch)\.org/(?:whl|simple))", re.IGNORECASE)


def tracked(suffixes: set[str]) -> list[Path]:
    """Files of the project, those not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30).stdout.decode()
    paths = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return [path for path in paths if path.suffix in suffixes and path.is_file() and path.name != "LICENSE"]


def lines_with(pattern: re.Pattern[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if pattern.search(line):
            yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def modules(*folders: str) -> list[Path]:
    return [path for path in tracked({".py"}) if path.relative_to(ROOT).parts[0] in folders]


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    sizes = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in tracked(CODE)}
    assert {str(path): size for path, size in sizes.items() if size > MAX_LINES} == {}


def foreign_paths(line: str) -> list[str]:
    folders = (match.group(1) for match in PATH_START.finditer(line))
    private = PRIVATE_FOLDERS | {entry.name for entry in Path("/").iterdir()} - SYSTEM_FOLDERS
    return [folder for folder in folders if folder in private]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open('/home/anna/x.csv')", ["home"]),
        ("see /opt/stuff/readme", ["opt"]),
        ("#!/usr/bin/env bash", []),
        ("read /proc/cpuinfo and /sys/devices/x", []),
        ("rows/s, and/or, 1/2/3, a/b/c", []),
        ("../shared/data/x, ./a/b, ~/a/b, $HOME/a/b", []),
        ("https://host.example/a/b", []),
        ("ssd_paths=[/nvme0/run1]", []),
        ("conf/*/x/y.yaml, <dir>/a/b, {root}/a/b", []),
    ],
)
def test_the_search_for_foreign_paths_finds_what_it_should(line: str, found: list[str]) -> None:
    assert foreign_paths(line) == found


def test_no_path_of_somebodys_machine() -> None:
    exempt = {Path(__file__), ROOT / ".gitignore"}
    findings = [
        line
        for path in tracked(TEXT)
        if path not in exempt
        for line in lines_with(PATH_START, path)
        if foreign_paths(line.split(": ", 1)[1])
    ]
    assert findings == []


def test_nothing_is_left_unfinished() -> None:
    here = Path(__file__)
    assert [line for path in tracked(CODE) if path != here for line in lines_with(UNFINISHED, path)] == []


def test_no_package_storehouse_is_named() -> None:
    here = Path(__file__)
    assert [line for path in tracked(TEXT) if path != here for line in lines_with(STOREHOUSES, path)] == []


def test_text_is_utf8_without_tabs_in_python_and_ends_with_a_newline() -> None:
    findings = []
    for path in tracked(TEXT):
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            findings.append(f"{path.relative_to(ROOT)}: no newline at the end")
        if "\r" in text and path.suffix != ".csv":
            findings.append(f"{path.relative_to(ROOT)}: carriage return")
        if path.suffix == ".py" and "\t" in text:
            findings.append(f"{path.relative_to(ROOT)}: tab")
    assert findings == []


def test_no_large_file_is_tracked() -> None:
    """Data never lies in the tree; a megabyte is more than any source needs."""
    command = ["git", "ls-files", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30).stdout.decode().split("\0")
    sizes = {name: (ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file()}
    assert {name: size for name, size in sizes.items() if size > 2**20} == {}


@pytest.mark.parametrize("path", modules("torchrec_kstep", "benchmarks", "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_lives_in_it(path: Path) -> None:
    if path.stat().st_size:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)}: no module docstring"


def test_every_folder_of_the_package_is_a_package() -> None:
    """A folder without `__init__.py` works in the checkout and is missing from the wheel."""
    folders = {path.parent for path in modules("torchrec_kstep")}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()) == []


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods without a docstring.

    An overriding method may inherit it by `@override`; a property may be described under `Attributes` of its class.
    """
    pending: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        attributes = set(re.findall(r"^ +(\w+):", (ast.get_docstring(parent, clean=False) or "").partition("Attributes:")[2], re.MULTILINE))
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            is_described = "property" in decorators and node.name in attributes
            if ast.get_docstring(node) is None and not is_described and not decorators & {"override", "overload", "setter"}:
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                pending.append((f"{prefix}{node.name}.", node))


def test_every_public_name_is_documented() -> None:
    findings = {
        str(path.relative_to(ROOT)): list(undocumented(ast.parse(path.read_text()))) for path in modules("torchrec_kstep", "benchmarks")
    }
    assert {path: names for path, names in findings.items() if names} == {}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_below(room: str, forbidden: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("torchrec_kstep")
        if room in path.relative_to(ROOT).parts
        for name in imported(ast.parse(path.read_text()))
        if forbidden.match(name)
    ]


def test_the_architecture_document_shows_the_layers_that_are_checked() -> None:
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    checked = configuration["importlinter:contract:layers"]["layers"].replace("(", "").replace(")", "").strip()
    document = (ROOT / "docs" / "architecture.md").read_text()
    shown = document.partition("## Layers")[2].partition("```text\n")[2].partition("\n```")[0]
    assert shown.splitlines() == checked.splitlines()


@pytest.mark.parametrize("room", ["models", "data"])
def test_models_and_data_know_nothing_of_process_groups(room: str) -> None:
    assert imports_below(room, re.compile(r"(torch|torchrec)\.distributed\b")) == []


def test_nothing_unpickles() -> None:
    """A file from disk must never be able to run code."""
    pickle = re.compile(r"(pickle|cloudpickle|dill|joblib|shelve)\b")
    loads = re.compile(r"torch\.load\((?!.*weights_only=True)|np\.load\(.*allow_pickle=True")
    assert imports_below("torchrec_kstep", pickle) == []
    assert [line for path in modules("torchrec_kstep") for line in lines_with(loads, path)] == []


def test_only_two_rooms_and_the_launcher_read_the_environment() -> None:
    """The launcher prepares what its ranks inherit, routes tell gloo and NCCL of interfaces; everything else is told."""
    reading = re.compile(r"\bos\.(environ|getenv)\b")
    allowed = {"torchrec_kstep/world.py", "torchrec_kstep/config/load.py", "torchrec_kstep/launch/__main__.py"}
    allowed |= {"torchrec_kstep/routes/environment.py"}
    findings = [line for path in modules("torchrec_kstep") for line in lines_with(reading, path)]
    assert [line for line in findings if line.split(":")[0] not in allowed] == []


def test_the_locks_pin_every_package_once_and_never_both_fbgemms() -> None:
    pins = [
        line for lock in ("cpu.txt", "dev.txt") for line in (ROOT / "requirements" / lock).read_text().splitlines() if line[:1] not in "#"
    ]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert "fbgemm-gpu-cpu" in names
    assert not {"fbgemm-gpu", "torch"} & set(names)
