"""Every error that this package raises on purpose.

A message says what failed, what was expected and what was found (with units), where (table, row, rank, file, line), and
what to do next. Programming faults of our own are `assert`s and never appear here.
"""


class KStepError(Exception):
    """Root of all errors raised by `torchrec_kstep`."""


class ConfigError(KStepError, ValueError):
    """The configuration is wrong; carries every finding, not only the first."""


class DataError(KStepError, ValueError):
    """Input rows, files or a prepared set are malformed, missing or changed."""


class PlanError(KStepError):
    """No valid sharding plan exists for the given tables, ranks and constraints."""


class TopologyError(KStepError, ValueError):
    """A description of machines is wrong, incomplete, or of other machines than those at hand; carries every finding."""


class CheckpointError(KStepError):
    """A checkpoint is missing, incomplete, corrupt, or of another run's shape."""


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing or do not match their checksums; an older one may be good."""


class DivergenceError(KStepError):
    """The loss or a prediction became NaN or infinite."""


class MergeError(KStepError):
    """A merge round could not be done: a replica is late, gone, or not what the others are."""


class LaunchError(KStepError):
    """Hosts or ranks do not find one another, or were not started alike."""


class RankFailure(KStepError):  # noqa: N818 - names what happened to a rank, as the log line does
    """Another rank failed first; its own message is the cause."""


class KernelNotBuiltError(KStepError, ImportError):
    """The compiled library is absent or was built for another torch."""


class IncompatibleTorchRecError(KStepError, ImportError):
    """The installed TorchRec or FBGEMM is not one that this package was proven against."""


class StorageError(KStepError):
    """A row store could not do what was asked."""


class CorruptionError(StorageError):
    """Bytes on disk do not match their checksum or format."""


class TierFullError(StorageError):
    """A tier's byte quota or its medium is exhausted."""


class StorageIOError(StorageError, OSError):
    """The operating system refused a read, write or sync."""
