"""Turns the command line of a sweep into one list of overrides per run."""

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from torchrec_kstep.config.findings import Findings

_MAX_FOLDER_CHARS = 100  # file systems allow 255 bytes


@dataclass(frozen=True)
class Job:
    """One run of a program.

    Attributes:
        overrides: its overrides, without sweeps.
        title: line that announces it; "" outside a sweep.
        folder: name of its run directory inside that of the sweep; "" outside a sweep or where the sweep names `run_dir`.
        started: when the sweep was started.
    """

    overrides: tuple[str, ...]
    title: str
    folder: str
    started: time.struct_time


def jobs_of(overrides: Sequence[str], multirun: bool, findings: Findings) -> list[Job]:
    """Returns the runs of a command line: every combination of swept values under --multirun, else one.

    Overrides that cannot be read or expanded are left as they are, for the checks that follow to report.
    """
    started = time.localtime()
    if not multirun:
        return [Job(tuple(overrides), "", "", started)]
    choices = [_expand(text, findings) for text in overrides]
    combinations = list(itertools.product(*choices))
    names_run_dir = any(len(values) > 1 and values[0].startswith("run_dir=") for values in choices)
    jobs = []
    for index, combination in enumerate(combinations):
        swept = [text for text, values in zip(combination, choices, strict=True) if len(values) > 1]
        folder = re.sub(r"[^A-Za-z0-9_.=,+-]+", "_", f"{index}_{','.join(swept)}".rstrip("_"))[:_MAX_FOLDER_CHARS]
        title = f"run {index + 1} of {len(combinations)}: {' '.join(swept)}".rstrip(": ")
        jobs.append(Job(combination, title, "" if names_run_dir else folder, started))
    return jobs


def _expand(text: str, findings: Findings) -> list[str]:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return [text]  # the check of overrides says what is wrong with it
    if not override.is_sweep_override():
        return [text]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        findings.add(f"{text}: --multirun takes lists (a,b) and ranges (range(1,4)) only", override.key_or_group)
        return []
