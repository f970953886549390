"""`run.json`: what is known of a run besides its numbers: configuration, ranks, plan, versions, hardware."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchrec_kstep.units import format_bytes
from torchrec_kstep.world import World

FACTS_NAME = "run.json"
PACKAGES = ("torchrec_kstep", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchx", "numpy", "pyarrow")


def write_facts(
    folder: Path,
    *,
    world: World,
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    plan: str,
    routes: str = "",
    resumed_from_step: int = 0,
) -> None:
    """Writes `run.json` into a run directory, durably; what earlier attempts of the same run wrote is kept as a list of attempts.

    Args:
        folder: the run directory.
        world: the ranks.
        config: the resolved configuration as nested mappings.
        data: name, fingerprint and rows per split.
        plan: the sharding plan as text.
        routes: cores, drives and interfaces of the ranks as text; "" where they were left alone.
        resumed_from_step: step of the checkpoint that this attempt continued from; 0 = from the start.
    """
    path = folder / FACTS_NAME
    attempts = _attempts(path)
    attempt = {"started": datetime.now().astimezone().isoformat(timespec="seconds"), "from_step": resumed_from_step}
    facts = {
        "attempts": [*attempts, attempt],
        "ranks": {"ranks": world.world_size, "hosts": world.num_hosts, "ranks per host": world.local_world_size},
        "data": dict(data),
        "plan": plan,
        "routes": routes,
        "versions": versions(),
        "hardware": hardware(),
        "config": dict(config),
    }
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(facts, indent=1, default=str))
        file.flush()
        os.fsync(file.fileno())  # or the name could outlive a power cut and the content not
    os.replace(partial, path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempts(path: Path) -> list[Any]:
    """What `run.json` says of earlier attempts; nothing where it is damaged, because a run need not end for a record about it."""
    try:
        attempts = json.loads(path.read_text(encoding="utf-8"))["attempts"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
    return attempts if isinstance(attempts, list) else []


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that decide about results."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """Describes this host, which is rank 0's."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "host": platform.node(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": format_bytes(memory_bytes),
        "kernel": f"{platform.system()} {platform.release()}",
    }
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if gpus:
        found["GPUs"] = f"{len(gpus)} x {_field(str(gpus[0]), 'Model')}"
    return found


def _field(path: str, name: str) -> str:
    """Returns the first `name: value` of a file of the kernel's, or "" where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
