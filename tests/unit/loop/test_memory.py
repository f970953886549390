"""Layer: loop, one rank. Goal: steps, evaluations and checkpoints leave nothing behind: memory and open files stay flat."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multiprocess.tiny import TinyDataset, one_rank_group, start, tiny_config
from torchrec_kstep.world import World

MIB = 1 << 20


@pytest.fixture
def world() -> Iterator[World]:
    """One rank, with logging off: pytest would keep every record of `torch.distributed.checkpoint`, which looks like a leak."""
    logging.disable(logging.CRITICAL)
    try:
        with one_rank_group() as alone:
            yield alone
    finally:
        logging.disable(logging.NOTSET)


class Forgetful(TinyDataset):
    """Does not remember which rows it gave away."""

    @property
    def rows_seen(self) -> list[list[int]]:
        return []

    @rows_seen.setter
    def rows_seen(self, _: list[list[int]]) -> None:
        pass


def resident_mib(world: World, tmp_path: Path, epochs: int, **changes: object) -> tuple[list[float], list[int]]:
    """Resident memory and open files after each epoch of 10 steps, one evaluation and one checkpoint."""
    process = psutil.Process(os.getpid())
    loop, state = start(tiny_config(train__epochs=epochs, **changes), world, Forgetful(num_train=320), tmp_path)
    memory, files = [], []
    validate = loop._validate

    def note(*args: object) -> None:
        validate(*args)  # type: ignore[arg-type]
        gc.collect()
        memory.append(process.memory_info().rss / MIB)
        files.append(process.num_fds())

    loop._validate = note  # type: ignore[method-assign,assignment]
    loop.train(state)
    loop.sinks.close()
    return memory, files


def assert_flat(memory: list[float], files: list[int], warm: int) -> None:
    """The last quarter is within 2 % of what was there when warm, and no file was left open."""
    first, last = memory[warm], sorted(memory[-len(memory) // 4 :])[0]
    assert last <= first * 1.02, f"resident memory grew from {first:.1f} to {last:.1f} MiB: {[round(m) for m in memory]}"
    assert max(files[warm:]) <= files[warm], files


def test_memory_and_open_files_are_flat_over_150_steps(world: World, tmp_path: Path) -> None:
    memory, files = resident_mib(world, tmp_path, 15)
    assert_flat(memory, files, warm=6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kernel", "embedding", "pipeline"), [("dense", "adam", "sparse_dist"), ("fused", "adagrad", "plain")])
def test_memory_and_open_files_are_flat_over_2000_steps(world: World, tmp_path: Path, kernel: str, embedding: str, pipeline: str) -> None:
    changes = {"planner__kernel": kernel, "optim__embedding": embedding, "train__pipeline": pipeline}
    memory, files = resident_mib(world, tmp_path, 200, **changes)
    assert_flat(memory, files, warm=20)
