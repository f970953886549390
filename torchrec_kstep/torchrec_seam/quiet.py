"""Warnings that the pinned TorchRec and torch give on every healthy CPU run, and that no user can act on.

Each entry names the message and why it is harmless here. Nothing else is hidden.
"""

import functools
import logging
import warnings

_WARNINGS = (
    # FBGEMM registers the gradient of its dense CPU lookup in a way that torch is about to forbid; the gradients are right
    # (the equality tests compare them with plain torch).
    r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not registered",
    # TorchRec's sharded state is made of `ShardedTensor`, which torch wants to replace one day; saving touches its fields.
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    # TorchRec shows sharded tables as `ShardedTensor` unless told otherwise, and checkpoints of these work.
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    # TorchRec calls functions that torch 2.13 has renamed.
    r"`broadcast_buffers` is deprecated",
    r"`torch\.distributed\.reduce_scatter_tensor` is deprecated",
    r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
)
_LOG_LINES = (
    # Said of each table without a cache, for which none was asked.
    ("torchrec.distributed.utils", "caching params will be ignored"),
    # There are no pods of hosts here; and the groups inside and across hosts are made as they should be.
    ("torchrec.distributed.comm", "TORCHREC_RESOLVED_POD_SIZE not set"),
    ("torchrec.distributed.comm", "[Connection] intra_group"),
    ("torchrec.distributed.comm", "[Connection] cross_group"),
    # TorchRec's pipeline asks torch whether it is being traced, by a name that torch wants to retire.
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true"),
)


@functools.cache
def silence_known_warnings() -> None:
    """Hides the warnings listed above in this process. Calling it again does nothing."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for logger, text in _LOG_LINES:
        logging.getLogger(logger).addFilter(functools.partial(_is_wanted, text))


def _is_wanted(text: str, record: logging.LogRecord) -> bool:
    """Tells whether a log line is any but the known one."""
    return text not in record.getMessage()
