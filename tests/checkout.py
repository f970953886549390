"""The files of the project as they stand, for tests that need a clean copy: no build products, no .venv, no data."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def project_files(pattern: str = ".") -> set[str]:
    """Paths, relative to the checkout, that match a git pathspec; those not committed yet are included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", pattern]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
    return {name for name in listing.split("\0") if name and (ROOT / name).is_file()}


def copy_checkout(folder: Path) -> Path:
    """Copies all files of the project into `folder`, permissions included, and returns it."""
    for name in project_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
        target.chmod((ROOT / name).stat().st_mode)
    return folder
