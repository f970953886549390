"""TorchX components: registered beside TorchX's own, checked at submission, arguments untouched, requests as expected.

Nothing is started but shells that print their arguments; running jobs is tested in tests/multihost.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from torchx import specs
from torchx.runner import config as runner_config
from torchx.specs import macros
from torchx.specs.builders import _create_args_parser, materialize_appdef
from torchx.specs.finder import ModuleComponentsFinder, get_component, get_components

from torchrec_kstep import components, submission
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.footprint import host_memory_bytes
from torchrec_kstep.units import MIB

GOLDEN = Path(__file__).parent / "golden"
GIB = 1 << 30

# What prints its arguments stands in for `python` on PATH.
ECHO = """#!/bin/sh
exec "{python}" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
"""


def train(*overrides: str, **options: object) -> specs.AppDef:
    return components.train(*overrides, **{"rdzv_port": 29500, "memMB": 2000, **options})  # type: ignore[arg-type]


def line_of(app: specs.AppDef) -> str:
    (role,) = app.roles
    assert role.entrypoint == "bash"
    assert role.args[0] == "-c"
    return role.args[1]


def matches_golden(name: str, text: str) -> None:
    """Compares exactly; KSTEP_UPDATE_GOLDEN=1 writes the file anew, except in CI."""
    path = GOLDEN / name
    if os.environ.get("KSTEP_UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs: if that is meant, run the test with KSTEP_UPDATE_GOLDEN=1 and review the diff"


@pytest.fixture(scope="module")
def path_with_echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python").write_text(ECHO.format(python=sys.executable))
    (folder / "python").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def run_line(line: str, path: str, **env: str) -> list[str]:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True, env={"PATH": path, **env})
    return list(json.loads(done.stdout))


def test_ours_are_registered_and_torchx_s_own_stay_visible() -> None:
    own = {component.name for component in ModuleComponentsFinder("torchx.components", "").find() if not component.validation_errors}
    registered = set(get_components())
    assert {"kstep.train", "kstep.prepare"} <= registered
    assert own <= registered


@pytest.mark.parametrize("name", ["train", "prepare"])
def test_torchx_accepts_the_definition_and_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    component = get_component(f"{components.__file__}:{name}")
    with pytest.raises(SystemExit) as left:
        _create_args_parser(component.fn).parse_args(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "overrides" in shown
    assert f"python -m torchrec_kstep.{name}" in " ".join(shown.split())


def test_reading_the_components_imports_no_tensor_library() -> None:
    code = "import sys, torchrec_kstep.components; print([m for m in ('torch', 'torchrec', 'numpy', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"


def test_a_faulty_configuration_is_refused_before_submission() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        train("optim.lrr=1e-3")


@pytest.mark.parametrize("overrides", [("optim.lr=1e-3", "-j", "2x1"), ("-j2x1",), ("optim.lr=1e-3", "--memMB=5")])
def test_options_among_overrides_are_refused_with_the_right_order(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="come before"):
        train(*overrides)


@pytest.mark.parametrize("separator", [["--"], []])
def test_the_command_line_of_torchx_reaches_the_component(separator: list[str]) -> None:
    options = ["-j", "2x3", "--rdzv_port", "29501", "--env", "A=1,B=2"]
    app = materialize_appdef(components.train, [*options, *separator, "optim.lr=1e-3"])
    (role,) = app.roles
    assert (role.num_replicas, role.port_map, role.env["A"], role.env["B"]) == (2, {"c10d": 29501}, "1", "2")
    assert "--nproc-per-node 3" in line_of(app)
    assert "optim.lr=1e-3" in line_of(app)


def test_parameters_reach_the_scheduler() -> None:
    mounts = ["type=bind", "src=/data", "dst=/mnt", "readonly"]
    (role,) = train(j="2x4", cpu=16, gpu=4, memMB=1234, mounts=mounts, max_retries=3).roles
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (16, 4, 1234)
    assert (role.num_replicas, role.max_retries) == (2, 3)
    assert "--max-restarts 3" in role.args[1]
    (mount,) = role.mounts
    assert isinstance(mount, specs.BindMount)
    assert (mount.src_path, mount.dst_path, mount.read_only) == ("/data", "/mnt", True)


def test_a_named_resource_replaces_cpu_gpu_and_memory() -> None:
    (role,) = train(h="aws_p4d.24xlarge", cpu=1, memMB=1).roles
    assert role.resource == specs.named_resources["aws_p4d.24xlarge"]


def test_the_run_directory_is_the_same_in_every_attempt_and_the_user_s_choice_wins() -> None:
    assert line_of(train()).endswith(f"run_dir=runs/{macros.app_id}")
    assert line_of(train("run_dir=/shared/a")).count("run_dir=") == 1


def test_a_port_in_use_on_this_machine_is_passed_over() -> None:
    first = submission._free_port()
    with socket.create_server(("", first)):
        assert submission._free_port() > first


overrides_of_any_kind = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
        lambda text: not text.startswith("-")
    ),
    max_size=4,
)


@settings(max_examples=60)
@given(overrides=overrides_of_any_kind)
@example(
    overrides=["optim.lr=1e-3", "model.mlp=[256,128]", 'run_dir="a b"', "x='{a: 1, b: \"q,u\"}'", "y=${oc.env:HOME}", "z=$$ $(id) `id`"]
)
@example(overrides=["a\nb", "${app_id}", "$app_id", "\\", "~x", "++data.limit=5", "*", ">out", "# no comment", "e=é"])
def test_overrides_arrive_untouched(overrides: list[str], path_with_echo: str) -> None:
    role = submission.preparation_role(overrides, "", cpu=1, memory_mb=1, h=None, max_retries=0)
    filled = macros.Values(img_root="", app_id="id", replica_id="0", rank0_env="HOST").apply(role)
    assert run_line(filled.args[1], path_with_echo) == ["-m", "torchrec_kstep.prepare", *overrides]


def test_each_host_gets_the_launcher_the_meeting_point_and_the_job_s_id(path_with_echo: str) -> None:
    app = train("data.source='a b.tsv'", j="2x1")
    filled = macros.Values(img_root="", app_id="job-1", replica_id="0", rank0_env="FIRST_HOST").apply(app.roles[0])
    for env, host in (({"FIRST_HOST": "10.0.0.7"}, "10.0.0.7"), ({}, "localhost"), ({"FIRST_HOST": ""}, "localhost")):
        arguments = run_line(filled.args[1], path_with_echo, **env)
        assert arguments[:2] == ["-m", "torchrec_kstep.launch"]
        assert arguments[arguments.index("--rdzv-endpoint") + 1] == f"{host}:29500"
        assert arguments[arguments.index("--rdzv-id") + 1] == "job-1"
        assert arguments[-4:] == ["-m", "torchrec_kstep.train", "data.source='a b.tsv'", "run_dir=runs/job-1"]


def memory_bytes(*overrides: str, num_hosts: int = 1, ranks_per_host: int = 1) -> int:
    return host_memory_bytes(load(RunConfig, "train", overrides), num_hosts, ranks_per_host)


def test_memory_follows_tables_optimizer_ranks_and_hosts() -> None:
    """A million rows of dim 16 per table, 26 tables: 1.55 GiB of weights, four times that with Adam's states."""
    big = ("data=synthetic", "data.synthetic.num_rows_per_table=[" + ",".join(["1000000"] * 26) + "]")
    weights_bytes = 26_000_000 * 16 * 4
    small = memory_bytes("data=synthetic", "data.synthetic.num_rows_per_table=[10]")
    assert memory_bytes(*big) - small >= 4 * weights_bytes
    assert memory_bytes(*big, num_hosts=2) < memory_bytes(*big) - 1.5 * weights_bytes
    assert memory_bytes(*big, "optim.embedding=sgd") < memory_bytes(*big) - 1.5 * weights_bytes
    copied = memory_bytes(*big, "planner=dense", "planner.sharding=data_parallel", ranks_per_host=2)
    assert copied > memory_bytes(*big, ranks_per_host=2) + 3 * weights_bytes
    assert memory_bytes(ranks_per_host=4) > 2 * memory_bytes()


def test_of_tables_on_ssd_memory_holds_the_cache_and_the_index() -> None:
    """Otherwise the scheduler would be asked for all that the drive is there to save."""
    rows = ("data=synthetic", "data.synthetic.num_rows_per_table=[26000000]")
    on_ssd = memory_bytes(*rows, "tiers=dram_ssd", "tiers.dram_bytes=128MiB")
    assert on_ssd < memory_bytes(*rows) / 2
    assert memory_bytes(*rows, "tiers=dram_ssd", "tiers.dram_bytes=1GiB") > on_ssd + 800 * MIB
    assert memory_bytes(*rows, "tiers=dram_ssd", "tiers.dram_bytes=100GiB") == memory_bytes(*rows)


def test_memory_counts_the_rows_of_a_prepared_set(tmp_path: Path) -> None:
    manifest = {"dense": [], "sparse": [{"name": "user", "num_rows": 200_000_000}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert memory_bytes(f"data.path={tmp_path}") > 200_000_000 * 16 * 4 * 4


def test_memory_is_asked_for_unless_given() -> None:
    (role,) = components.train("data=synthetic", "data.synthetic.num_rows_per_table=[100000000]", j="1x2").roles
    assert 20_000 < role.resource.memMB < 60_000


def test_slurm_request(tmp_path: Path) -> None:
    """By command line, as a user types it; the script that sbatch would get is compared with the golden one."""
    command = [
        sys.executable,
        "-m",
        "torchx.cli.main",
        "run",
        "-s",
        "slurm",
        "-cfg",
        "partition=gpu,time=60",
        "--dryrun",
        "--workspace",
        "",
    ]
    command += ["kstep.train", "-j", "2x4", "--cpu", "16", "--gpu", "4", "--memMB", "64000", "--max_retries", "1", "--rdzv_port", "29500"]
    command += ["--", "optim.lr=1e-3", "model.mlp=[256,128]", "data.path='/data/criteo, day 0'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    script = done.stdout.partition("=== SCHEDULER REQUEST ===\n")[2]
    assert subprocess.run(["bash", "-n"], input=script.partition("#!/bin/bash")[2], text=True, timeout=10, check=False).returncode == 0
    matches_golden("slurm.txt", script)


def test_kubernetes_request() -> None:
    """Through the scheduler class: `torchx run -s kubernetes --dryrun` wants a cluster. The id, drawn at random, is masked."""
    pytest.importorskip("kubernetes", reason="the extra torchrec_kstep[kubernetes] is not installed")
    from torchx.schedulers.kubernetes_scheduler import create_scheduler

    scheduler = create_scheduler("test")
    app = train("optim.lr=1e-3", "model.mlp=[256,128]", j="2x4", image="registry/kstep:1", cpu=16, gpu=4, memMB=64000, max_retries=1)
    with pytest.warns(UserWarning, match="Volcano"):
        request = scheduler.submit_dryrun(app, {"queue": "default"})
    text = str(request)
    (identity,) = set(re.findall(r"^  name: (train-\w+)$", text, re.MULTILINE))
    matches_golden("kubernetes.yaml", text.replace(identity, "train-id"))


def test_the_sample_configuration_is_read(root: Path) -> None:
    """`.torchxconfig` of the checkout keeps logs: without it TorchX deletes them when the job ends."""
    cfg: dict[str, specs.CfgVal] = {}
    with (root / ".torchxconfig").open() as sample:
        runner_config.load("local_cwd", sample, cfg)
    assert cfg == {"log_dir": "runs/torchx"}
    assert runner_config.get_config("cli", "run", "scheduler", dirs=[str(root)]) == "local_cwd"
