"""One rank of a training job that also counts what its collectives send; prints the count as JSON. Slower than plain training."""

import json
import os
import sys

from benchmarks.collective_bytes import CollectiveBytes
from torchrec_kstep import train

with CollectiveBytes(int(os.environ["LOCAL_WORLD_SIZE"])) as counted:
    code = train.main(sys.argv[1:])
print(json.dumps({"sent_bytes": counted.total_bytes, "calls": dict(counted.num_calls)}))
sys.exit(code)
