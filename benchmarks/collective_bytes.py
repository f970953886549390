"""How many bytes a rank's collectives put on the wire, by the algorithms of gloo, to hold against interface counters.

| collective | bytes that one rank sends, payload S, W ranks |
|---|---|
| all_reduce, reduce_scatter | ring: 2 (W-1)/W S (gloo reduces everything, then each rank keeps its part) |
| all_gather | ring: (W-1) S, S being one rank's part |
| all_to_all | what is addressed to ranks of other hosts |
| broadcast | the root's S reaches W-1 ranks: (W-1)/W S a rank on average |

In a ring of ranks in host order, one of every `local_world_size` sends leaves its host.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveBytes(TorchDispatchMode):
    """Counts, while active, the bytes that this rank's collectives send to other hosts.

    Attributes:
        sent_bytes: per collective name.
        num_calls: per collective name.
    """

    def __init__(self, local_world_size: int = 1) -> None:
        """Counts for hosts of `local_world_size` ranks each; groups that are not the whole world must have one rank per host."""
        super().__init__()
        self.local_world_size = local_world_size
        self.sent_bytes: dict[str, float] = defaultdict(float)
        self.num_calls: dict[str, int] = defaultdict(int)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives together."""
        return round(sum(self.sent_bytes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operator, if it is a collective, and runs it."""
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in _SENT:
            self.sent_bytes[name] += _SENT[name](args, self.local_world_size)
            self.num_calls[name] += 1
        return func(*args, **(kwargs or {}))


def ring_all_reduce_bytes(payload_bytes: int, world_size: int) -> float:
    """Bytes that one rank sends in a ring all-reduce (and in gloo's reduce-scatter)."""
    return 2 * (world_size - 1) / world_size * payload_bytes


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group(script_object: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(script_object)


def _leaving(group: dist.ProcessGroup, local_world_size: int) -> int:
    """Returns of how many sends in a ring one leaves the host."""
    return local_world_size if group.size() == dist.get_world_size() else 1


def _all_reduce(args: Any, local_world_size: int) -> float:
    group = _group(args[1])
    return sum(ring_all_reduce_bytes(_bytes(tensor), group.size()) for tensor in args[0]) / _leaving(group, local_world_size)


def _reduce_scatter_base(args: Any, local_world_size: int) -> float:
    group = _group(args[2])
    return ring_all_reduce_bytes(_bytes(args[1]), group.size()) / _leaving(group, local_world_size)


def _reduce_scatter(args: Any, local_world_size: int) -> float:
    group = _group(args[2])
    payload_bytes = sum(_bytes(tensor) for part in args[1] for tensor in part)
    return ring_all_reduce_bytes(payload_bytes, group.size()) / _leaving(group, local_world_size)


def _all_gather_base(args: Any, local_world_size: int) -> float:
    group = _group(args[2])
    return (group.size() - 1) * _bytes(args[1]) / _leaving(group, local_world_size)


def _all_gather(args: Any, local_world_size: int) -> float:
    group = _group(args[2])
    return (group.size() - 1) * sum(_bytes(tensor) for tensor in args[1]) / _leaving(group, local_world_size)


def _all_to_all_base(args: Any, local_world_size: int) -> float:
    tensor, group, splits = args[1], _group(args[2]), args[4]
    size = group.size()
    rows = list(splits) or [tensor.shape[0] // size] * size
    row_bytes = _bytes(tensor) / tensor.shape[0] if tensor.shape[0] else 0.0
    return row_bytes * sum(rows[peer] for peer in _peers_on_other_hosts(group, local_world_size))


def _all_to_all(args: Any, local_world_size: int) -> float:
    group = _group(args[2])
    return float(sum(_bytes(args[1][peer]) for peer in _peers_on_other_hosts(group, local_world_size)))


def _peers_on_other_hosts(group: dist.ProcessGroup, local_world_size: int) -> list[int]:
    width = _leaving(group, local_world_size)
    return [peer for peer in range(group.size()) if peer // width != group.rank() // width]


def _broadcast(args: Any, local_world_size: int) -> float:
    group = _group(args[1])
    num_hosts = group.size() // _leaving(group, local_world_size)
    return sum(_bytes(tensor) for tensor in args[0]) * (num_hosts - 1) / group.size()


_SENT: dict[str, Callable[[Any, int], float]] = {
    "allreduce_": _all_reduce,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_": _reduce_scatter,
    "_allgather_base_": _all_gather_base,
    "allgather_": _all_gather,
    "alltoall_base_": _all_to_all_base,
    "alltoall_": _all_to_all,
    "broadcast_": _broadcast,
}
