"""Preparing Criteo logs and reading the prepared set, against pyarrow alone on the same files.

`op=prepare`: raw lines to a prepared set, against reading the same lines with pyarrow's CSV reader and writing them to Parquet
as they are. `op=read`: the training split as batches of KeyedJaggedTensors, against decoding all columns of all row groups of the
same files into Arrow memory and dropping them. Our stream decodes in two threads, so pyarrow gets two as well, and both run on two
cores of the machine; `pyarrow_read_1_thread` tells what a thread of its own brings to it. `epoch=first` opens the set anew in each round,
so takes fresh memory and verifies the checksums of all pages, which of the peers `pyarrow_read_verify` alone does; `epoch=later` reads a
set that was read before.
Lines are synthetic: the cardinalities of Criteo Kaggle, Zipf 1.05, a tenth of the values missing. The page cache is warm.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks._harness import Contender, Harness, Spread, measure
from torchrec_kstep.config.schema import DataConfig, SyntheticConfig
from torchrec_kstep.data import BatchOrder
from torchrec_kstep.data.mixing import mix64, uniform
from torchrec_kstep.data.preparation import prepare
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.data.sources.criteo import FORMAT
from torchrec_kstep.data.synthetic import SyntheticStream
from torchrec_kstep.data.zipf import Zipf

# Distinct values of C1..C26 in the Criteo Kaggle set.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
ROWS_PER_CHUNK = 250_000
BATCH_SIZE = 8192
MISSING_SHARE = 0.1
NUM_THREADS = 2  # that decode for our stream, and so of pyarrow; both sides run on as many cores
MAX_ROUNDS = 5  # a round of preparation at full size takes most of a minute


def main(argv: list[str] | None = None) -> int:
    """Runs all cases."""
    run = Harness.from_command_line("data", __doc__, argv)
    num_lines = 200_000 if run.quick else 5_000_000
    with tempfile.TemporaryDirectory(prefix="kstep-bench-") as name:
        folder = Path(name)
        write_lines(folder / "train.txt", num_lines)
        for encoding in ("vocabulary", "hash"):
            bench_prepare(run, folder, num_lines, encoding)
        pa.set_cpu_count(NUM_THREADS)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])
        for epoch in ("first", "later"):
            for shuffle in (True, False):
                bench_read(run, folder / "vocabulary", shuffle, epoch)
    bench_synthetic(run, 20_000 if run.quick else 200_000)
    return run.finish()


def bench_prepare(run: Harness, folder: Path, num_lines: int, encoding: str) -> None:
    """Compares throughput and peak memory; each round runs in a process of its own, timed from within."""
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    peak_mib: dict[str, list[float]] = {"ours": [], "peer": []}
    target = folder / encoding

    def in_process(side: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_data", "--child", *arguments]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600).stdout.split()
        seconds[side].append(float(output[-2]))
        peak_mib[side].append(float(output[-1]))

    contenders = {
        "ours": Contender(
            lambda: in_process("ours", encoding, str(folder / "train.txt"), str(target)), lambda: shutil.rmtree(target, ignore_errors=True)
        ),
        "peer": Contender(lambda: in_process("peer", "pyarrow", str(folder / "train.txt"), str(folder / "peer.parquet"))),
    }
    num_warmup_rounds = 0 if run.quick else 1
    measure(contenders, min(run.num_rounds, MAX_ROUNDS), num_warmup_rounds)
    rates = {side: Spread.of([num_lines / sample for sample in samples[num_warmup_rounds:]]) for side, samples in seconds.items()}
    peaks = {side: Spread.of(samples[num_warmup_rounds:]) for side, samples in peak_mib.items()}
    case = {"op": "prepare", "encoding": encoding, "lines": num_lines}
    run.record(case, "throughput", "rows/s", rates["ours"], "pyarrow_read_write", rates["peer"], higher_is_better=True)
    run.record(case, "peak_memory", "MiB", peaks["ours"], "pyarrow_read_write", peaks["peer"])


def bench_read(run: Harness, prepared: Path, shuffle: bool, epoch: str) -> None:
    """Compares the whole training split, as batches of one rank, with decoding the same row groups and nothing more."""
    data = PreparedSet(prepared)
    files = [prepared / part.path for part in data.manifest.files("train")]
    num_rows = data.num_rows("train")

    def read_batches() -> None:
        source = PreparedSet(prepared) if epoch == "first" else data
        assert sum(len(batch.label) for batch in source.batches("train", BatchOrder(batch_size=BATCH_SIZE, shuffle=shuffle))) == num_rows

    def read_row_groups(use_threads: bool = True, verify: bool = False) -> None:
        count = 0
        for path in files:
            with pq.ParquetFile(path, memory_map=True, page_checksum_verification=verify) as file:
                count += sum(file.read_row_group(index, use_threads=use_threads).num_rows for index in range(file.num_row_groups))
        assert count == num_rows

    def read_arrow_batches() -> None:
        count = 0
        for path in files:
            with pq.ParquetFile(path, memory_map=True) as file:
                count += sum(batch.num_rows for batch in file.iter_batches(batch_size=BATCH_SIZE))
        assert count == num_rows

    peers: dict[str, Callable[[], None]] = {
        "pyarrow_read": read_row_groups,
        "pyarrow_read_1_thread": partial(read_row_groups, use_threads=False),
        "pyarrow_read_batches": read_arrow_batches,
    }
    if epoch == "first":
        peers["pyarrow_read_verify"] = partial(read_row_groups, verify=True)
    run.compare(
        {"op": "read", "rows": num_rows, "batch": BATCH_SIZE, "shuffle": str(shuffle).lower(), "epoch": epoch},
        ours=read_batches,
        peers=peers,
        unit="rows",
        num_items=num_rows,
    )


def bench_synthetic(run: Harness, num_rows: int) -> None:
    """Reports how fast the synthetic stream is made; there is nothing to compare it with."""
    config = SyntheticConfig(num_train_rows=num_rows, num_rows_per_table=list(CARDINALITIES))
    data = SyntheticStream(config, prefetch_batches=0)

    def read() -> None:
        assert sum(len(batch.label) for batch in data.batches("train", BatchOrder(batch_size=BATCH_SIZE))) == num_rows

    run.compare({"op": "synthetic", "rows": num_rows, "batch": BATCH_SIZE, "ids": "zipf"}, read, {}, unit="rows", num_items=num_rows)


def write_lines(path: Path, num_lines: int) -> None:
    """Writes synthetic Criteo lines, tab-separated."""
    zipfs = [Zipf(cardinality, 1.05) for cardinality in CARDINALITIES]
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file:
        for begin in range(0, num_lines, ROWS_PER_CHUNK):
            keys = mix64(np.arange(begin, min(begin + ROWS_PER_CHUNK, num_lines), dtype=np.uint64), 1)
            pyarrow.csv.write_csv(pa.table(list(_columns(keys, zipfs)), names=[name for name, _ in FORMAT.columns]), file, options)


def _columns(keys: npt.NDArray[np.uint64], zipfs: list[Zipf]) -> Iterable[pa.Array]:
    yield pa.array((uniform(mix64(keys, 2)) < 0.25).astype(np.int8))
    for column in range(13):
        draws = uniform(mix64(keys, 100 + column))
        yield _with_missing(pa.array((np.exp(4 * draws**3) ** 1.5 - 2).astype(np.int64)), keys, column)
    digits = np.array([f"{byte:02x}" for byte in range(256)], dtype="S2")
    for column, zipf in enumerate(zipfs):
        ranks = zipf.ranks(uniform(mix64(keys, 200 + column)))
        hashes = mix64(ranks, column).astype(">u4").view(np.uint8).reshape(-1, 4)
        text = np.ascontiguousarray(digits[hashes])
        fixed = pa.Array.from_buffers(pa.binary(8), len(keys), [None, pa.py_buffer(text)])
        yield _with_missing(fixed.cast(pa.binary()).cast(pa.string()), keys, 13 + column)


def _with_missing(values: pa.Array, keys: npt.NDArray[np.uint64], column: int) -> pa.Array:
    return pc.if_else(pa.array(uniform(mix64(keys, 300 + column)) < MISSING_SHARE), pa.scalar(None, values.type), values)


def child(mode: str, source: str, target: str) -> None:
    """Does one round of preparation, or of the peer's reading and writing; prints seconds and peak MiB."""
    begin_s = time.perf_counter()
    if mode == "pyarrow":
        names = [name for name, _ in FORMAT.columns]
        with (
            pyarrow.csv.open_csv(
                source, pyarrow.csv.ReadOptions(column_names=names), pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False)
            ) as reader,
            pq.ParquetWriter(target, reader.schema) as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)
    else:
        prepare(DataConfig(name="criteo", source=source, path=target, encoding=mode, num_hash_rows=1_000_000))
    seconds = time.perf_counter() - begin_s
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
