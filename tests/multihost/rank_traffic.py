"""One rank of the traffic proof: runs one collective and prints what its own count says left this host."""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.collective_bytes import CollectiveBytes

kind, payload_bytes, local_world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world_size = dist.get_rank(), dist.get_world_size()
payload = torch.arange(payload_bytes // 4, dtype=torch.float32)
with CollectiveBytes():  # the first use of a dispatch mode imports much of torch, which is no matter of links
    dist.all_reduce(torch.zeros(1))
dist.barrier()
started_s = time.monotonic()
with CollectiveBytes(local_world_size) as counted:
    if kind == "all_reduce":
        dist.all_reduce(payload)
        assert payload[1] == world_size, payload[1]
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(payload), payload)
    elif kind == "all_to_all_uneven":  # rank 0 sends a third of its part to everyone else and keeps the rest
        part = len(payload) // world_size
        sent = [part if peer == rank or rank else part // 3 for peer in range(world_size)]
        got = [part if peer == rank or peer else part // 3 for peer in range(world_size)]
        dist.all_to_all_single(torch.empty(sum(got)), payload[: sum(sent)].clone(), got, sent)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(torch.empty(world_size * len(payload)), payload)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(len(payload) // world_size), payload)
    elif kind == "broadcast":
        dist.broadcast(payload, 0)
print(json.dumps({"rank": rank, "sent_bytes": counted.total_bytes, "duration_s": time.monotonic() - started_s}))
dist.barrier()  # nobody tears its connections down while a peer still uses them
dist.destroy_process_group()
