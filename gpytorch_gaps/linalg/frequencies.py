"""Spectra of block-circulant matrices: one small matrix for every frequency.

>>> spectrum = torch.eye(2, dtype=torch.float64).reshape(2, 2, 1) * torch.arange(1.0, 4.0)  # of three frequencies
>>> filtered(spectrum, torch.ones(1, 2, 3, dtype=torch.complex128), 1).real
tensor([[[1., 2., 3.],
         [1., 2., 3.]]], dtype=torch.float64)
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.positions import Positions


def stored_by_frequency(spectrum: Tensor, torus_dims: int) -> Tensor:
    """The same tensor, with the matrix of each frequency contiguous in memory: products then need not copy it.

    shape: (*batch, a, b, *frequencies)
    """
    last = tuple(range(-torus_dims, 0))
    before = tuple(dim - 2 for dim in last)
    return spectrum.movedim(last, before).contiguous().movedim(before, last)


def by_frequency(spectrum: Tensor, torus_dims: int) -> Tensor:
    """shape: (*batch, a, b, *frequencies) -> (*batch, frequencies, a, b)"""
    return spectrum.flatten(-torus_dims).movedim(-1, -3)


def filtered(spectrum: Tensor, x: Tensor, torus_dims: int) -> Tensor:
    """``L x`` at every frequency. shape: (*batch, a, b, *f) and (*batch, C, b, *f) -> (*batch, C, a, *f)"""
    dense_dim = -torus_dims - 2
    if spectrum.size(dense_dim) == spectrum.size(dense_dim + 1) == 1:
        return spectrum.squeeze(dense_dim).unsqueeze(dense_dim) * x
    frequencies = x.shape[-torus_dims:]
    # complex numbers as two columns of a real product, one matrix for each frequency
    parts = torch.view_as_real(x.flatten(-torus_dims)).movedim(-2, -4)  # shape: (*batch, f, C, b, 2)
    image = by_frequency(spectrum, torus_dims) @ parts.movedim(-2, -3).flatten(-2)  # shape: (*batch, f, a, C * 2)
    image = image.unflatten(-1, (x.size(dense_dim), 2)).movedim(-4, -2).contiguous()  # shape: (*batch, a, C, f, 2)
    return torch.view_as_complex(image).transpose(-3, -2).unflatten(-1, frequencies)


def to_frequencies(x: Tensor, torus: Sequence[int], positions: Sequence[Positions]) -> Tensor:
    """Values at some positions, on the torus, transformed one axis at a time: earlier axes are still short.

    shape: (..., m_1, ..., m_s) -> (..., n_1, ..., n_s // 2 + 1)
    """
    for axis in reversed(range(len(torus))):
        dim, places, own = axis - len(torus), torus[axis], positions[axis]
        if torch.is_tensor(own):
            shape = list(x.shape)
            shape[dim] = places
            x = x.new_zeros(shape).index_add(dim, own, x)
        x = torch.fft.rfft(x, n=places, dim=dim) if dim == -1 else torch.fft.fft(x, n=places, dim=dim)
    return x


def from_frequencies(x: Tensor, torus: Sequence[int], positions: Sequence[Positions]) -> Tensor:
    """Back to values at some positions. shape: (..., n_1, ..., n_s // 2 + 1) -> (..., q_1, ..., q_s)"""
    for axis, (places, own) in enumerate(zip(torus, positions, strict=True)):
        dim = axis - len(torus)
        x = torch.fft.irfft(x, n=places, dim=dim) if dim == -1 else torch.fft.ifft(x, n=places, dim=dim)
        x = x.index_select(dim, own) if torch.is_tensor(own) else x.narrow(dim, 0, own)
    return x


def conjugate_pairs(circles: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The frequencies k that a real transform keeps, their opposites -k, and where each frequency is among these.

    Frequencies are numbered with the last circle fastest. The third result counts k first, then all -k.

    >>> first, second, place = conjugate_pairs((5,), torch.device("cpu"))
    >>> first.tolist(), second.tolist(), place.tolist()
    ([0, 1, 2], [0, 4, 3], [0, 1, 2, 5, 4])
    """
    kept = (*circles[:-1], circles[-1] // 2 + 1)
    first = second = torch.zeros(1, dtype=torch.long, device=device)
    for places, some in zip(circles, kept, strict=True):
        own = torch.arange(some, device=device)
        first = (first.unsqueeze(-1) * places + own).flatten()
        second = (second.unsqueeze(-1) * places + (-own) % places).flatten()
    number = torch.arange(len(first), device=device)
    place = torch.empty(math.prod(circles), dtype=torch.long, device=device)
    return first, second, place.scatter_(0, second, len(first) + number).scatter_(0, first, number)
