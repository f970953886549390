"""The only unit conversions: bytes, rates and durations to and from text. GiB means 2**30 bytes everywhere."""

import re
from fractions import Fraction

from torchrec_kstep.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BIT_UNITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_SECOND_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Turns `"8GiB"`, `"1.5 MiB"` or `"4096B"` into a number of bytes; a part of a byte is dropped.

    Raises:
        ConfigError: the text has no unit or an unknown one; a bare number is refused because its unit would be a guess.
    """
    match = _BYTES_PATTERN.fullmatch(text)
    if match is None or match.group(2) not in _BYTE_UNITS:
        raise ConfigError(f"cannot read {text!r} as a size: expected a number and a unit out of {', '.join(_BYTE_UNITS)}, e.g. '8GiB'")
    return int(Fraction(match.group(1)) * _BYTE_UNITS[match.group(2)])  # exact, also above 2**53


def parse_bandwidth(text: str) -> float:
    """Turns `"12.5GB/s"`, `"3 GiB/s"` or `"100Gbit/s"` into bytes per second.

    Raises:
        ConfigError: the text has no unit, an unknown one, or no `/s`.
    """
    quantity, _, per = text.strip().partition("/")
    match = _BYTES_PATTERN.fullmatch(quantity)
    units = _BYTE_UNITS | {name: bits / 8 for name, bits in _BIT_UNITS.items()}
    if per.strip() != "s" or match is None or match.group(2) not in units:
        raise ConfigError(f"cannot read {text!r} as a bandwidth: expected a number and a unit, e.g. '12.5GB/s', '3GiB/s' or '100Gbit/s'")
    return float(match.group(1)) * units[match.group(2)]


def parse_duration(text: str) -> float:
    """Turns `"3us"`, `"1.5 ms"` or `"250ns"` into seconds.

    Raises:
        ConfigError: the text has no unit or an unknown one.
    """
    match = _BYTES_PATTERN.fullmatch(text)
    if match is None or match.group(2) not in _SECOND_UNITS:
        raise ConfigError(f"cannot read {text!r} as a duration: expected a number and a unit out of {', '.join(_SECOND_UNITS)}, e.g. '3us'")
    return float(match.group(1)) * _SECOND_UNITS[match.group(2)]


def format_bandwidth(bytes_per_s: float) -> str:
    """Writes bytes per second as data sheets do, in powers of ten: `"12.5 GB/s"`. Four digits are kept."""
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if float(f"{bytes_per_s / scale:.4g}") >= 1:
            return f"{bytes_per_s / scale:.4g} {unit}"
    return f"{bytes_per_s:.4g} B/s"


def format_bytes(num_bytes: float) -> str:
    """Writes a number of bytes with the largest binary unit that leaves a value of at least one, e.g. `"1.5 GiB"`.

    Four digits are kept; up to 1023 bytes the number is exact.
    """
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # Compared after rounding to four digits, so that 2**20 - 1 bytes is "1 MiB" and never "1024 KiB".
        if round(abs(num_bytes) / (scale // KIB)) >= KIB:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Writes a duration for people: `"3.2 ms"`, `"41.0 s"`, `"2 h 05 min"`.

    Units are chosen after rounding, so that no part overflows into the next ("2 min 00 s", never "1 min 60 s").
    """
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 999.5e-3:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    whole_minutes = round(seconds / 60)
    return f"{whole_minutes // 60} h {whole_minutes % 60:02d} min"
