"""Plans kept in files, by the hash of everything that they were made from."""

import os
from pathlib import Path

from torchrec_kstep.errors import PlanError
from torchrec_kstep.planner.placement import Placement


class PlanCache:
    """A folder of plans.

    Args:
        folder: made when the first plan is written.
    """

    def __init__(self, folder: Path) -> None:
        """Opens nothing."""
        self._folder = folder

    def read(self, key: str) -> Placement | None:
        """Returns the plan made from exactly the same things, or None."""
        file = self._file(key)
        return load_placement(file, key) if file.is_file() else None

    def write(self, placement: Placement) -> None:
        """Keeps a plan; a reader never sees half of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(placement.key)
        unfinished = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        unfinished.write_text(placement.to_json(), encoding="utf-8")
        unfinished.replace(file)

    def _file(self, key: str) -> Path:
        return self._folder / f"plan-{key}.json"


def load_placement(file: Path, key: str) -> Placement:
    """Reads a plan that must have been made from what `key` stands for.

    Raises:
        PlanError: it cannot be read, or was made for other machines, tables or settings.
    """
    try:
        placement = Placement.from_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: cannot be read: {error}") from error
    if placement.key != key:
        raise PlanError(
            f"{file} holds a plan for other machines, tables or settings (topology {placement.topology!r}, {placement.world_size} ranks): "
            "delete it, or plan anew"
        )
    return placement
