"""Hashing of numbers: seeded mixing, uniform draws and bijections, all vectorised and without state."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_U64 = np.uint64


def mix64(keys: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Hashes 64-bit keys under a seed with the finaliser of SplitMix64 (Steele, Lea, Flood 2014), twice for independent seeds.

    A bijection of the keys for every seed.
    """
    mixed = _finalise(keys + _U64(_mix_int(seed)))
    return _finalise(mixed + _U64(_GOLDEN))


def uniform(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Turns hashes into numbers in the open interval (0, 1), of 52 bits each."""
    return ((hashes >> _U64(12)).astype(np.float64) + 0.5) * 2.0**-52


def hash_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hashes each text of a unicode array; meant for distinct values, not for rows."""
    digests = b"".join(hashlib.blake2b(str(value).encode(), digest_size=8).digest() for value in values)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def scatter(indices: npt.NDArray[np.uint64], size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Permutes the numbers 0..size-1, by a bijection that depends on `size` and `seed` and is never stored.

    Mixes within the next power of two by steps that are bijections there; whoever lands at `size` or above walks on along
    the cycle until it is below, so the restriction is a bijection too, after less than two rounds on average.
    """
    num_bits = max(1, int(size - 1).bit_length())
    result = _permute_power_of_two(indices.astype(np.uint64), num_bits, seed)
    while (outside := np.flatnonzero(result >= _U64(size))).size:
        result[outside] = _permute_power_of_two(result[outside], num_bits, seed)
    return result


def _permute_power_of_two(values: npt.NDArray[np.uint64], num_bits: int, seed: int) -> npt.NDArray[np.uint64]:
    mask = _U64((1 << num_bits) - 1)
    shift = _U64(max(1, num_bits // 2))
    for step in range(3):
        key = _mix_int(seed * 3 + step)
        values = (values * _U64(key | 1) + _U64(key >> 17)) & mask
        values ^= values >> shift
    return values


def _finalise(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values ^ (values >> _U64(30))
    values *= _U64(0xBF58476D1CE4E5B9)
    values ^= values >> _U64(27)
    values *= _U64(0x94D049BB133111EB)
    values ^= values >> _U64(31)
    return values


def _mix_int(value: int) -> int:
    value = (value * _GOLDEN + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
