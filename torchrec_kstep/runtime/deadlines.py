"""No wait without a deadline, also in process groups that others make."""

from datetime import timedelta

from torch.distributed import distributed_c10d


def bound_waits(timeout: timedelta) -> None:
    """Gives every process group of this rank the deadline `timeout`. Not collective.

    TorchRec makes groups of its own for tables that are split within a host, and those get gloo's default of 30 minutes. torch
    has no public way to list groups or to change their deadline.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)
