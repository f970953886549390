"""Merge messages: what is packed comes back, and its size is known beforehand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.merge.message import Format, Section, count_type, formats, pack_header, sent_bytes, unpack_header
from torchrec_kstep.merge_spec import MergeSpec


@given(
    num_rows=st.integers(0, 40),
    row_id_type=st.sampled_from([torch.int32, torch.int64]),
    counts=st.sampled_from([None, torch.uint8, torch.int16, torch.int32, torch.float32]),
    widths=st.lists(st.integers(1, 19), max_size=3),
)
def test_messages_come_back_as_they_were(num_rows: int, row_id_type: torch.dtype, counts: torch.dtype | None, widths: list[int]) -> None:
    form = Format(row_id_type, counts, tuple(Section(f"f{index}", width) for index, width in enumerate(widths)))
    noise = torch.Generator().manual_seed(num_rows)
    rows = torch.randint(0, 1 << 30, (num_rows,), generator=noise)
    touches = torch.randint(0, 100, (num_rows,), generator=noise)
    fields = [torch.randint(0, 256, (num_rows, width), generator=noise).to(torch.uint8) for width in widths]
    pieces = form.pack(rows, touches, fields)
    message = torch.cat(pieces)
    assert message.numel() == form.num_bytes(num_rows) <= form.row_bytes * num_rows + 8 * len(form.sections)
    # In the middle of a larger buffer, as messages of several senders arrive.
    buffer = torch.cat([torch.zeros(8, dtype=torch.uint8), message, torch.zeros(3, dtype=torch.uint8)])
    got_rows, got_touches, got_fields = form.unpack(buffer[8 : 8 + message.numel()], num_rows)
    assert torch.equal(got_rows.long(), rows)
    assert got_touches is None if counts is None else torch.equal(got_touches.long(), touches)  # type: ignore[union-attr]
    assert all(torch.equal(got, sent) for got, sent in zip(got_fields, fields, strict=True))


def test_a_header_may_begin_anywhere() -> None:
    header = torch.cat([torch.zeros(1, dtype=torch.uint8), pack_header([3, -1, 1 << 30])])
    assert unpack_header(header[1:]) == [3, -1, 1 << 30]


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
