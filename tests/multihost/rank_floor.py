"""One rank that prints the step floor it was given."""

import json

from benchmarks.hosts import StepFloor

print(json.dumps({"floor_ms": StepFloor().floor_s * 1e3}))
