"""Random bits as a pure function of a key, so that ranks, resumed runs and the order of access agree."""

import zlib

import torch
from torch import Tensor

_BITS = 64
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(number: int) -> int:
    """An integer modulo 2^64, as int64 holds it."""
    number %= 1 << _BITS
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


def _shift(bits: Tensor, count: int) -> Tensor:
    # int64 shifts copy the sign bit in; a logical shift needs zeros there.
    return (bits >> count) & ((1 << (_BITS - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of 64-bit words; int64 products wrap as unsigned ones do."""
    bits = bits + _signed(_STEP)
    for count, factor in _ROUNDS:
        bits = (bits ^ _shift(bits, count)) * _signed(factor)
    return bits ^ _shift(bits, 31)


def keyed_bits(*keys: int | str | Tensor) -> Tensor:
    """64 random bits for each key.

    Args:
        *keys: Integers, names, or int64 tensors that broadcast.

    Returns:
        An int64 tensor of the broadcast shape, on the CPU.
    """
    bits = torch.zeros((), dtype=torch.int64)
    for key in keys:
        if isinstance(key, str):
            key = zlib.crc32(key.encode())
        bits = _mix(bits ^ (_signed(key) if isinstance(key, int) else key))
    return bits


def keyed_integer(limit: int, *keys: int | str) -> int:
    """An integer in [0, limit) drawn by a key; the bias is below limit/2^63."""
    return int(_shift(keyed_bits(*keys), 1)) % limit


def keyed_order(count: int, *keys: int | str) -> Tensor:
    """A permutation of `count` indices drawn by a key."""
    return torch.argsort(keyed_bits(*keys, torch.arange(count)), stable=True)
