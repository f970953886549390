"""The few numbers of the cost model that belong to software, not to a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

# What `calibrate` fits for ranks on cores. Phases are linear in each of them.
FITTED = (
    "step_s",
    "feature_s",
    "sample_s",
    "flop_s",
    "activation_s",
    "parameter_s",
    "optimizer_s",
    "lookup_id_s",
    "update_row_s",
    "cached_byte_s",
    "pooled_byte_s",
    "core_shard_s",
    "collective_s",
    "turn_s",
    "cache_row_s",
    "admit_row_s",
    "tier_row_s",
    "merge_row_s",
    "merge_round_s",
    "memory_factor",
    "exchange_factor",
    "drive_factor",
)
FACTORS = ("memory_factor", "exchange_factor", "drive_factor")  # without a unit: 1 takes the machine at its word


@dataclass(frozen=True)
class Coefficients:
    """Times of the software, and how far a prediction is trusted.

    The defaults were measured with this package on one core of a virtual server (Intel Xeon with AVX-512), December 2026. Times of
    cores are those of a core that a rank has for itself; where ranks share cores they take as much longer.

    Attributes:
        step_s: of every step on cores: Python, the pipeline, autograd.
        feature_s: per sparse feature in every step, wherever its table lies, on cores: views, copies, autograd.
        sample_s: per row of data of a rank, on cores: copies, features, loss.
        flop_s: per operation of dense layers on a core.
        activation_s: per value that goes into or comes out of a dense layer, on a core: memory, activations, interactions.
        parameter_s: per dense parameter on a core: its optimizer.
        optimizer_s: of every step of the dense optimizer on cores, besides.
        lookup_id_s: per id looked up on a core, memory not counted: hashing, bags, pooling.
        update_row_s: per different row updated on a core, memory not counted.
        cached_byte_s: per byte of rows pooled, and of gradients handed out, on a core: rows that come again are in its caches.
        pooled_byte_s: per byte of pooled rows, made or read back as gradient, on a core: copies before and after exchanges.
        core_shard_s: per shard of a table on a core: splitting, concatenating, autograd.
        collective_s: per exchange, besides the latency of the way.
        turn_s: per exchange and rank more than one on a core: a rank that others wait for waits itself until the core is given to it.
        cache_row_s: per different row that is looked up through a cache over a drive, on the cores that compute.
        admit_row_s: per row brought up from a drive, on the cores that compute.
        tier_row_s: per row read from and written to a drive, in the threads of the store: submission, index, eviction.
        merge_row_s: per row collected or changed in a merge round, on a core.
        merge_round_s: per merge round, besides: opening, agreement.
        memory_factor: time that random rows take on cores, over that by the topology.
        exchange_factor: time of bytes that ranks on cores hand on, over that by the topology.
        drive_factor: time of drives, over that by the topology: a probe's threads reach less, a busy cleaner leaves less.
        device_shard_s: per shard of a table on a device: kernel launches.
        device_collective_s: as `collective_s`, on devices.
        device_flops_per_s: dense layers on a device.
        measured_error: part of a phase by which predictions on a measured machine are off; a calibration sets it so that the error bar
            covers four of five runs that the fit did not see.
        declared_error: the same where the machine's numbers come from a data sheet.
    """

    step_s: float = 4e-3
    feature_s: float = 100e-6
    sample_s: float = 0.3e-6
    flop_s: float = 1 / 80e9
    activation_s: float = 4e-9
    parameter_s: float = 1.5e-9
    optimizer_s: float = 0.6e-3
    lookup_id_s: float = 60e-9
    update_row_s: float = 100e-9
    cached_byte_s: float = 0.2e-9
    pooled_byte_s: float = 0.4e-9
    core_shard_s: float = 50e-6
    collective_s: float = 400e-6
    turn_s: float = 2e-3
    cache_row_s: float = 0.2e-6
    admit_row_s: float = 0.3e-6
    tier_row_s: float = 1.5e-6
    merge_row_s: float = 1e-6
    merge_round_s: float = 2e-3
    memory_factor: float = 2.0
    exchange_factor: float = 2.0
    drive_factor: float = 1.0
    device_shard_s: float = 4e-6
    device_collective_s: float = 20e-6
    device_flops_per_s: float = 40e12
    measured_error: float = 0.2
    declared_error: float = 0.35

    @classmethod
    def zero(cls) -> "Coefficients":
        """Software that takes no time: the machine alone."""
        values = {name: 1.0 if name in FACTORS else 0.0 for name in FITTED}
        return cls(**values, device_shard_s=0.0, device_collective_s=0.0)

    def having(self, values: Mapping[str, float]) -> "Coefficients":
        """Returns these with some of them replaced."""
        return replace(self, **values)

    def values(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
