"""How fast ranks hand data to each other with the library that training uses."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_kstep.topology import Exchange
from torchrec_kstep.units import MIB

_LARGE_BYTES = 4 * MIB  # to each other rank
_BURST_BYTES = MIB  # to each other rank, after a pause in which a shaper gathers as much
_LEAST_BURST = 0.1  # of what was sent: what passes sooner by less is noise
_MIN_CALLS = 3


def measure_exchange(group: dist.ProcessGroup, ranks: Sequence[int], seconds: float) -> Exchange:
    """Measures all-to-all among the ranks of a group. Collective: call on all of them.

    Args:
        group: at least two ranks.
        ranks: of the group.
        seconds: about how long.

    Returns:
        Bandwidth of one rank each way, and the time of an exchange without data; the same on all ranks.
    """
    others = len(ranks) - 1
    small_s = _all_to_all_s(group, len(ranks), 8, seconds / 2)
    large_s = _all_to_all_s(group, len(ranks), _LARGE_BYTES, seconds / 2)
    slowest = torch.tensor([small_s, large_s], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    small_s, large_s = slowest.tolist()
    return Exchange(others * _LARGE_BYTES / max(large_s - small_s, 1e-9), small_s * 1e6)


def measure_burst(group: dist.ProcessGroup, ranks: Sequence[int], steady: Exchange, seconds: float) -> float:
    """Measures how many bytes pass at once after a pause, as through a shaper that counts tokens. Collective: call on all of them.

    Args:
        group: at least two ranks, each behind a card of its own.
        ranks: of the group.
        steady: what exchanges without pauses between them reach.
        seconds: about how long.

    Returns:
        Bytes, at most a megabyte to each other rank; 0 where nothing passes sooner; the same on all ranks.
    """
    num_bytes = (len(ranks) - 1) * _BURST_BYTES
    pause_s = min(num_bytes / steady.bandwidth_bytes_per_s, seconds / _MIN_CALLS)
    slowest = torch.tensor([_all_to_all_s(group, len(ranks), _BURST_BYTES, seconds, pause_s)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    passed = num_bytes - steady.bandwidth_bytes_per_s * (float(slowest) - steady.latency_us * 1e-6)
    return passed if passed > _LEAST_BURST * num_bytes else 0.0


def _all_to_all_s(group: dist.ProcessGroup, num_ranks: int, num_bytes: int, seconds: float, pause_s: float = 0.0) -> float:
    """Seconds of the median call, each after a pause; all ranks make as many calls as the first rank has time for."""
    sent = torch.zeros(num_ranks * num_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while True:
        goes_on = torch.tensor([float(len(times) < _MIN_CALLS or time.perf_counter() < end)])
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN, group=group)  # agreed, so that no rank waits alone
        if not goes_on.item():
            break
        if pause_s:
            time.sleep(pause_s)
            dist.barrier(group)
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]
