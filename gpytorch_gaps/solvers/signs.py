"""Random signs that are the same on every device: a hash of where they stand, not the state of a generator.

Counters ``seed, row, column`` are mixed one into the other by the finalizer of SplitMix64 (Stafford's mix 13),

    z ^= z >> 30,   z *= 0xBF58476D1CE4E5B9,   z ^= z >> 27,   z *= 0x94D049BB133111EB,   z ^= z >> 31

in integers of 64 bits that wrap around, which devices agree on to the bit. Nothing crosses between host and device.

>>> random_signs(0, 2, 5, torch.zeros(()))
tensor([[-1.,  1., -1., -1., -1.],
        [ 1.,  1., -1.,  1., -1.]])
"""

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_signs(seed: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Plus or minus one, a half each, of the dtype and device of `like`. shape: (rows, columns)"""
    row, column = (torch.arange(count, device=like.device) for count in (rows, columns))
    mixed = _mix(column + _mix(row.unsqueeze(-1) + _mix_number(seed)))
    return (mixed & 1).mul_(2).sub_(1).to(like.dtype)


def _mix(counters: Tensor) -> Tensor:
    """SplitMix64's output for each of these states."""
    z = (counters + 1) * _signed(_GOLDEN)  # not zero at zero
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z >> bits`` as of an unsigned number: torch fills in the sign, which is cut off."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_number(seed: int) -> int:
    """:func:`_mix` of one number, on the host."""
    z = (seed + 1) * _GOLDEN % 2**64
    z = (z ^ z >> 30) * _FIRST % 2**64
    z = (z ^ z >> 27) * _SECOND % 2**64
    return _signed(z ^ z >> 31)


def _signed(z: int) -> int:
    """The same 64 bits as a number with a sign."""
    return z - 2**64 if z >= 2**63 else z
