"""Merge messages: what travels, and that its size is known beforehand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.merge.message import count_type, formats, pack_header, sent_bytes, unpack_headers
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.message_layout import Format, Formats
from torchrec_kstep.ops.reference_messages import written


@given(
    counts=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    dim=st.integers(1, 19),
    counted=st.sampled_from([None, torch.uint8, torch.int16]),
)
def test_the_size_of_a_message_is_known_beforehand(counts: list[int], dim: int, counted: torch.dtype | None) -> None:
    formats_ = [
        Format(torch.int32, counted, dim, ("weight",), ("bf16",)),
        Format(torch.int64, None, 3, ("weight", "m", "v"), ("int8", "int8", "bf16")),
        Format(torch.int32, torch.float32, dim, ("m",), ("fp32",)),
    ]
    sizes = Formats(formats_).num_bytes(torch.tensor([counts, [0, 0, 0]]))
    assert sizes.tolist() == [[form.num_bytes(count) for form, count in zip(formats_, counts, strict=True)], [0, 0, 0]]
    for form, count in zip(formats_, counts, strict=True):
        assert form.row_bytes * count <= form.num_bytes(count) <= form.row_bytes * count + 7 * len(form.item_bytes)
        values = [torch.randn(count, form.dim) for _ in form.fields]
        data = written(form, torch.arange(count), torch.ones(count), values, [0] * len(form.fields))
        assert data.numel() == form.num_bytes(count)


def test_headers_may_begin_anywhere() -> None:
    header = torch.cat([torch.zeros(4, dtype=torch.uint8), pack_header([3, -1, 1 << 30])])
    assert unpack_headers([header[4:], pack_header([0, 1, 2])]).tolist() == [[3, -1, 1 << 30], [0, 1, 2]]


@pytest.mark.parametrize(("num_steps", "dtype"), [(1, torch.uint8), (255, torch.uint8), (256, torch.int16), (32_768, torch.int32)])
def test_touches_take_the_narrowest_type_that_holds_the_steps(num_steps: int, dtype: torch.dtype) -> None:
    assert count_type(num_steps) == dtype
    assert torch.tensor(num_steps).to(dtype) == num_steps


def row_bytes(spec: MergeSpec, fields: tuple[str, ...], has_row_step: bool = True) -> tuple[int, int]:
    up, down = formats(spec, fields, 64, torch.int32, has_row_step, 20)
    return up.row_bytes, down.row_bytes


def test_only_what_is_needed_travels() -> None:
    states = ("weight", "m", "v")
    assert row_bytes(MergeSpec(row_states="weights"), ("weight",)) == (4 + 1 + 256, 4 + 256)
    assert row_bytes(MergeSpec(row_merge="mean"), ("weight",)) == (4 + 256, 4 + 256)
    assert row_bytes(MergeSpec(), states) == (4 + 1 + 768, 4 + 4 + 768)
    assert row_bytes(MergeSpec.of_recipe("paper"), states, has_row_step=False) == (4 + 768, 4 + 768)
    assert row_bytes(MergeSpec(wire="bf16"), states) == (4 + 1 + 384, 4 + 4 + 384)
    assert row_bytes(MergeSpec(wire="int8"), states) == (4 + 1 + 68 + 68 + 128, 4 + 4 + 68 + 68 + 128)  # v travels in bf16


def test_the_closed_formula_of_the_bytes_of_a_round() -> None:
    up, down = formats(MergeSpec(), ("weight",), 64, torch.int32, True, 20)
    assert sent_bytes(up, down, 1000, 3000, 4) == 0.75 * (1000 * 261 + 3000 * 260)
    assert sent_bytes(up, down, 1000, 1000, 1) == 0
