"""What identifies raw files and options, so that a prepared set knows what it was made from."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_kstep.units import MIB

WHOLE_FILE_BYTES = 64 * MIB  # files up to this size are hashed whole; of larger ones samples, size and time of change stand in
_SAMPLE_BYTES = MIB
_NUM_SAMPLES = 16


def describe_sources(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Describes raw files by name, size and content, in the given order."""
    return [_describe(path) for path in files]


def fingerprint(sources: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Digest over the description of the sources and the options of preparation."""
    text = json.dumps({"sources": sources, "options": options}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(path: Path) -> dict[str, Any]:
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if status.st_size <= WHOLE_FILE_BYTES:
            while chunk := file.read(_SAMPLE_BYTES):
                digest.update(chunk)
            return {"file": path.name, "size_bytes": status.st_size, "sha256": digest.hexdigest()}
        for sample in range(_NUM_SAMPLES):
            file.seek((status.st_size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return {"file": path.name, "size_bytes": status.st_size, "changed_ns": status.st_mtime_ns, "samples_sha256": digest.hexdigest()}
