"""Runs every benchmark, each in a process of its own, and says where the results went: `python -m benchmarks --quick`."""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEADLINE_S = 1800.0


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every benchmark ended well, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run, without bench_ (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, not how fast it is")
    parser.add_argument("--json-dir", type=Path, default=HERE / "results" / "local", help="folder of the results")
    options = parser.parse_args(argv)

    found = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    unknown = sorted(set(options.names) - set(found))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(found)}")
    if not found:
        print("benchmarks: there are none yet")
        return 0

    failed = []
    for name in options.names or found:
        print(f"\n=== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", str(options.json_dir.resolve() / f"{name}.json")]
        try:
            status = subprocess.run(command + ["--quick"] * options.quick, cwd=HERE.parent, timeout=DEADLINE_S, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"benchmarks: {name} was ended after {DEADLINE_S:.0f} s", file=sys.stderr)
            status = 1
        if status:
            failed.append(name)
    print(f"\nbenchmarks: results as JSON in {options.json_dir}")
    if failed:
        print(f"benchmarks: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
