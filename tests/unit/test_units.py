"""Sizes and durations: what is read back equals what was written, and no unit is ever guessed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep import units
from torchrec_kstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096B", 4096),
        ("8GiB", 8 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        (" 2 TiB ", 2**41),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("3GB", 3 * 10**9),
        ("0B", 0),
        ("9007199254740993B", 2**53 + 1),  # not a float
        ("0.1GiB", 107374182),
        ("1.9B", 1),
    ],
)
def test_parse_bytes_reads(text: str, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "8", "8 G", "8gib", "GiB", "-1GiB", "1e3MiB", "1,5GiB", "8GiB 1B", "nan B", "inf GiB", "٣GiB"])
def test_parse_bytes_refuses_and_shows_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        units.parse_bytes(text)


@given(st.integers(0, 2**63), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"]))
def test_parse_bytes_is_exact_for_whole_numbers(number: int, unit: str) -> None:
    assert units.parse_bytes(f"{number}{unit}") == number * units.parse_bytes(f"1{unit}")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * 2**20, "1.5 GiB"), (2**40, "1 TiB"), (-2048, "-2 KiB"), (2**20 - 1, "1 MiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert units.format_bytes(num_bytes) == text


@given(st.integers(0, 2**50))
def test_format_bytes_is_read_back_within_its_four_digits(num_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (3.2e-6, "3.2 us"),
        (0.0032, "3.2 ms"),
        (41, "41.0 s"),
        (119.94, "119.9 s"),
        (119.96, "2 min 00 s"),
        (120, "2 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (0.9996, "1.0 s"),
        (0.0009996, "1 ms"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@given(st.floats(0, 1e7, allow_subnormal=False))
def test_format_seconds_never_shows_a_unit_overflowing_into_the_next(seconds: float) -> None:
    text = units.format_seconds(seconds)
    assert "e+" not in text
    assert "60 s" not in re.sub(r"\d+\.\d s", "", text)
    assert "60 min" not in text
