"""What travels in a merge round: formats of the messages, the closed formula of their bytes, and the headers between them.

The bytes themselves are packed and read by `torchrec_kstep.ops.messages`.
"""

from collections.abc import Sequence

import torch

from torchrec_kstep.merge.layout import MOMENTS
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import merge as ops
from torchrec_kstep.ops.message_layout import Format


def formats(
    spec: MergeSpec, fields: Sequence[str], dim: int, row_id_type: torch.dtype, has_row_step: bool, num_steps: int
) -> tuple[Format, Format]:
    """Returns what travels up and down of each row whose `fields`, `dim` columns each, are merged after `num_steps` steps.

    Touches travel only where something is computed from them: union weights, renewed moments, a row's own step.
    """
    has_moments = any(field in MOMENTS for field in fields)
    needs_touches = has_moments and (spec.moments == "renew" or has_row_step)
    wires = tuple(ops.field_wire(field, spec.wire) for field in fields)
    up_counts = count_type(num_steps) if needs_touches or spec.row_merge == "union" else None
    down_counts = torch.float32 if needs_touches else None
    names = tuple(fields)
    return Format(row_id_type, up_counts, dim, names, wires), Format(row_id_type, down_counts, dim, names, wires)


def sent_bytes(up: Format, down: Format, num_own_rows: float, num_union_rows: float, num_replicas: int) -> float:
    """Returns the bytes that a replica sends in a round, on average over replicas; headers and filling not counted.

    Of its own rows it owns one in N, the others go up; of the union it owns one in N, and tells each of the N - 1 others.
    """
    return (num_replicas - 1) / num_replicas * (num_own_rows * up.row_bytes + num_union_rows * down.row_bytes)


def count_type(num_steps: int) -> torch.dtype:
    """Narrowest type that holds touches of up to `num_steps` steps."""
    if num_steps < 1 << 8:
        return torch.uint8
    return torch.int16 if num_steps < 1 << 15 else torch.int32


def pack_header(numbers: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Returns numbers of rows, each below 2^31, as `[4 n]` uint8."""
    return torch.as_tensor(numbers).to(torch.int32).view(torch.uint8)


def unpack_headers(headers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `[N, n]` int64 of N headers of the same length."""
    return torch.stack([header.clone().view(torch.int32) for header in headers]).to(torch.int64)
