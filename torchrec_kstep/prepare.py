"""`python -m torchrec_kstep.prepare`: raw logs to a prepared set, with progress and a report."""

import sys
import time

from torchrec_kstep.config.load import main
from torchrec_kstep.config.schema import PrepareConfig
from torchrec_kstep.data.manifest import Manifest
from torchrec_kstep.data.preparation import prepare, prepared_folder
from torchrec_kstep.errors import ConfigError, DataError
from torchrec_kstep.types import SPLITS
from torchrec_kstep.units import format_bytes, format_seconds

EXIT_DATA = 1  # exit code when the raw files are at fault, as other programs use it for a failed run
_SECONDS_BETWEEN_LINES = 5.0  # where stderr is no terminal


def run(config: PrepareConfig) -> int:
    """Prepares the set of the configuration and prints what it holds; tells faults of the raw files as one short text.

    Returns:
        0, or 1 where raw files are missing, malformed or changed.
    """
    if config.data.name == "synthetic":
        raise ConfigError("data=synthetic is made as it is read: there is nothing to prepare; train on it directly")
    try:
        began_s = time.time()
        with _Progress() as progress:
            manifest = prepare(config.data, overwrite=config.overwrite, progress=progress)
    except DataError as error:
        print(f"torchrec_kstep.prepare: {error}", file=sys.stderr)
        return EXIT_DATA
    print(report(manifest))
    print(f"{prepared_folder(config.data)} is ready after {format_seconds(time.time() - began_s)}")
    return 0


def report(manifest: Manifest) -> str:
    """Describes a prepared set for people: rows per split, rows per table, shares of missing and unseen ids, lines left out."""
    lines = [f"{manifest.name}: {len(manifest.dense)} dense columns, {len(manifest.sparse)} sparse features ({manifest.fingerprint})"]
    for split in SPLITS:
        entry = manifest.splits[split]
        size = format_bytes(sum(part.size_bytes for part in entry.files))
        positive = f"{entry.num_positive / entry.num_rows:.1%} positive, " if entry.num_rows else ""
        lines.append(f"  {split:<10} {entry.num_rows:>13,} rows, {positive}{size} in {len(entry.files)} files")
    lines.append(f"  {'column':<16} {'table rows':>13} {'missing':>9} {'unseen in train / validation / test':>36}")
    lines += [f"  {column.name:<16} {'dense':>13} {column.missing_share['train']:>9.2%}" for column in manifest.dense]
    for feature in manifest.sparse:
        unseen = " / ".join(f"{feature.unseen_share[split]:.2%}" for split in SPLITS)
        lines.append(f"  {feature.name:<16} {feature.num_rows:>13,} {feature.missing_share['train']:>9.2%} {unseen:>36}")
    if manifest.num_bad_lines:
        lines.append(f"  {manifest.num_bad_lines:,} malformed lines were left out, the first of them:")
        lines += [f"    {message}" for message in manifest.bad_lines]
    return "\n".join(lines)


class _Progress:
    """Says on stderr how far it is: on a terminal in one line that is written over, elsewhere in a line now and then."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._last_s = 0.0
        self._what = ""

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._what and sys.stderr.isatty():
            print(file=sys.stderr)

    def __call__(self, what: str, num_rows: int) -> None:
        now_s = time.time()
        is_terminal = sys.stderr.isatty()
        if what != self._what:
            self._what, self._began_s, self._last_s = what, now_s, 0.0
        if now_s - self._last_s < (0.1 if is_terminal else _SECONDS_BETWEEN_LINES):
            return
        self._last_s = now_s
        rate = num_rows / max(now_s - self._began_s, 1e-3)
        text = f"{what}: {num_rows:,} rows" + (f", {rate:,.0f} rows/s" if now_s > self._began_s else "")
        print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(PrepareConfig, "prepare", run))
