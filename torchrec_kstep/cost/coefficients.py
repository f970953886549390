"""The few numbers of the cost model that belong to software, not to a machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """Times of the software, and how far a prediction is trusted.

    The defaults were measured with this package's kernels on one core of a 2.6 GHz server CPU, December 2026.

    Attributes:
        lookup_id_s: per id looked up on a core, memory not counted: hashing, bags, pooling.
        update_row_s: per different row updated on a core, memory not counted.
        device_shard_s: per shard of a table on a device: kernel launches.
        core_shard_s: per shard of a table on a core: splitting, concatenating, autograd.
        tier_row_s: per row read from and written to a drive: submission, index, eviction.
        collective_s: per exchange, besides the latency of the way.
        device_collective_s: the same on devices.
        core_flops_per_s: dense layers on one core.
        device_flops_per_s: dense layers on a device.
        measured_error: part of a phase by which predictions on a measured machine are off, one standard deviation.
        declared_error: the same where the machine's numbers come from a data sheet.
    """

    lookup_id_s: float = 40e-9
    update_row_s: float = 60e-9
    device_shard_s: float = 4e-6
    core_shard_s: float = 30e-6
    tier_row_s: float = 1.5e-6
    collective_s: float = 100e-6
    device_collective_s: float = 20e-6
    core_flops_per_s: float = 30e9
    device_flops_per_s: float = 40e12
    measured_error: float = 0.2
    declared_error: float = 0.35
