"""Data of the stress tests: a vibrating membrane, random and cloud-shaped gaps, Rastrigin's function.

Fields may have 10^9 cells. They are computed slab by slab along axis 0, so that no array of the whole grid is needed. A
slab of the membrane or of the clouds is one product of two small matrices.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

_SLAB_CELLS = 2**24  # 64 MiB of float32
_SAMPLE_CELLS = 2**20  # cells that a quantile is estimated from
_LEVELS = 2**16  # of 16 random bits
_ROW_UNIT, _COLUMN_UNIT = 2**10, 2**14  # their product is the largest integer up to which float32 has every one
_DRIFT = 1.0  # lengths of an axis that clouds move by from the first time to the last


class Slabs(Protocol):
    """An array that is computed slab by slab along its axis 0."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def slab(self, start: int, stop: int) -> np.ndarray:
        """``self[start:stop]`` as a new array."""


@dataclass(frozen=True)
class Membrane:
    """``u = X C`` with the modes ``X[x, k] = sin(k pi x)`` and their course ``C[k, (y, t)]``; see :func:`membrane`."""

    shape: tuple[int, ...]
    rows: np.ndarray
    columns: np.ndarray

    def slab(self, start: int, stop: int) -> np.ndarray:
        """``u[start:stop]`` in float32; other slabs give the same to rounding."""
        return (self.rows[start:stop] @ self.columns).reshape(-1, *self.shape[1:])


def membrane(shape: tuple[int, int, int], *, seed: int = 0, modes: int = 12, duration: float = 1.0) -> Membrane:
    """A resonating membrane on axes (x, y, t): ``u_xx + u_yy = u_tt`` on the unit square, ``u = 0`` on its frame.

    ``u = sum_kl sin(k pi x) sin(l pi y) (a_kl cos(w_kl t) + b_kl sin(w_kl t))``, ``w_kl = pi sqrt(k^2 + l^2)``,
    k and l from 1 to `modes`, t from 0 to `duration`. Before scaling, ``a, b ~ N(0, exp(-(k^2 + l^2) / c^2))`` with
    ``c = modes / 3``, conditioned on a mean of zero over the grid; they are then scaled to a variance of one over it.
    Both are exact, from sums over the modes. By default the spectrum falls off faster than that of the kernel
    ``exp(-d^2 / 0.1^2)`` in every axis of unit length.
    """
    if len(shape) != 3 or min(shape[:2]) < 3:
        raise ValueError(f"the membrane needs axes (x, y, t) with points inside its frame, not the shape {shape}")
    wave = np.arange(1, modes + 1)
    x, y = (np.sin(np.pi * np.outer(np.linspace(0, 1, size), wave)) for size in shape[:2])
    squares = np.add.outer(wave**2, wave**2)
    phase = np.multiply.outer(np.pi * np.sqrt(squares), np.linspace(0, duration, shape[2]))
    course = np.stack([np.cos(phase), np.sin(phase)])  # (2, k, l, t)

    variance = np.exp(-squares / (modes / 3) ** 2)
    amplitudes = np.sqrt(variance) * np.random.default_rng(seed).standard_normal((2, modes, modes))
    means = np.multiply.outer(x.mean(0), y.mean(0)) * course.mean(-1)
    amplitudes -= variance * means * (means * amplitudes).sum() / (variance * means**2).sum()

    modal = np.einsum("pkl,pklt->tkl", amplitudes, course)
    power = (modal * ((x.T @ x) @ modal @ (y.T @ y))).sum() / math.prod(shape)
    columns = (modal / np.sqrt(power) @ y.T).transpose(1, 2, 0)  # (k, y, t)
    return Membrane(tuple(shape), x.astype(np.float32), columns.reshape(modes, -1).astype(np.float32))


@dataclass(frozen=True)
class RandomGaps:
    """Every cell is a gap independently of the others; see :func:`random_gaps`."""

    shape: tuple[int, ...]
    threshold: int
    seed: int

    def slab(self, start: int, stop: int) -> np.ndarray:
        """True where observed; the same for a cell whatever the slab."""
        rows = range(self.shape[0])[start:stop]
        size = math.prod(self.shape[1:])
        observed = np.empty((len(rows), size), dtype=bool)
        for out, row in zip(observed, rows, strict=True):
            words = np.random.SFC64(np.random.SeedSequence((self.seed, row))).random_raw(-(-size // 4))
            np.greater_equal(words.view(np.uint16)[:size], self.threshold, out=out)
        return observed.reshape(-1, *self.shape[1:])


def random_gaps(shape: tuple[int, ...], gappiness: float, *, seed: int) -> RandomGaps:
    """A gap where 16 random bits are below ``round(65536 gappiness)``: its probability is `gappiness` to 2^-17."""
    return RandomGaps(tuple(shape), round(gappiness * _LEVELS), seed)


@dataclass(frozen=True)
class CloudGaps:
    """A gap where the field ``X C`` of integers is below a threshold; see :func:`cloud_gaps`."""

    shape: tuple[int, ...]
    rows: np.ndarray
    columns: np.ndarray
    threshold: float

    def slab(self, start: int, stop: int) -> np.ndarray:
        """True where observed; the same for a cell whatever the slab, since no sum of integers rounds."""
        return (self.rows[start:stop] @ self.columns >= self.threshold).reshape(-1, *self.shape[1:])


def cloud_gaps(shape: tuple[int, ...], gappiness: float, *, seed: int, scale: float = 0.1) -> CloudGaps:
    """Gaps in the shape of clouds: a smooth random field below its quantile at `gappiness`.

    The field is Gaussian with correlation ``exp(-d^2 / scale^2)`` in every axis of unit length, a Fourier series
    ``sum_k f_k(x) sum_lm c_klm f_l(y + t) f_m(t)`` on axes (x, y, t): clouds drift along y by its length while they
    form and dissolve. Of more axes all but the first and the last drift, of two axes none. The quantile is that of
    an evenly spread sample of up to 2^20 cells. The factors are rounded to integers whose products sum to less than
    2^24, where float32 is exact.
    """
    if len(shape) < 2:
        raise ValueError(f"clouds need two axes or more, not the shape {shape}")
    period = 1 + 2 * scale  # the correlation across the seam is exp(-4)
    frequencies = 2 * np.pi / period * np.arange(math.ceil(3 * period / (np.pi * scale)) + 1)  # up to 6 / scale
    deviations = np.exp(-((frequencies * scale) ** 2) / 8)
    deviations = np.concatenate([deviations, deviations[1:]])

    def series(position: np.ndarray) -> np.ndarray:
        angle = np.multiply.outer(position, frequencies)
        return np.concatenate([np.cos(angle), np.sin(angle[..., 1:])], axis=-1)

    x, *middle, time = (np.linspace(0, 1, size) for size in shape)
    field = np.random.default_rng(seed).standard_normal((len(deviations),) * len(shape))
    for axis in range(len(shape)):
        field *= deviations.reshape(-1, *[1] * axis)
    field = field @ series(time).T
    for position in middle:
        field = np.einsum("kl...t,ytl->k...yt", field, series(np.add.outer(position, _DRIFT * time)))

    flat = field.reshape(len(deviations), -1)
    unit = (_COLUMN_UNIT - len(flat)) / np.abs(flat).max(axis=1).sum()
    rows = np.rint(_ROW_UNIT * series(x)).astype(np.float32)
    columns = np.rint(unit * flat).astype(np.float32)

    most = round(_SAMPLE_CELLS ** (1 / len(shape)))
    counts = [min(size, most) for size in shape]
    first, *rest = (
        ((np.arange(count) + 0.5) * size / count).astype(int) for size, count in zip(shape, counts, strict=True)
    )
    sample = columns.reshape(-1, *shape[1:])[np.ix_(range(len(columns)), *rest)].reshape(len(columns), -1)
    return CloudGaps(tuple(shape), rows, columns, float(np.quantile(rows[first] @ sample, gappiness)))


def write_gappy(path: str | Path, field: Slabs, gaps: Slabs, progress: bool = True) -> np.memmap:
    """Writes the field, NaN in the gaps, to an .npy file of float32 slab by slab; the file mapped into memory."""
    if field.shape != gaps.shape:
        raise ValueError(f"the field has the shape {field.shape}, the gaps {gaps.shape}")
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=field.shape)
    step = max(1, _SLAB_CELLS // math.prod(field.shape[1:]))
    with tqdm(total=math.prod(field.shape), desc="write", unit="cell", unit_scale=True, disable=not progress) as bar:
        for start in range(0, field.shape[0], step):
            values = field.slab(start, start + step)
            np.putmask(values, ~gaps.slab(start, start + step), np.nan)
            mapped[start : start + step] = values
            bar.update(values.size)
    mapped.flush()
    return mapped


def rastrigin(size: int) -> Tensor:
    """``20 + sum_i (x_i^2 - 10 cos(2 pi x_i))`` on [-5.12, 5.12]^2, standardised. shape: (size, size)"""
    x = torch.linspace(-5.12, 5.12, size, dtype=torch.float64)
    axis = x**2 - 10 * torch.cos(2 * math.pi * x)
    values = 20 + axis.unsqueeze(-1) + axis
    return (values - values.mean()) / values.std()


def squared_exponential(size: int, theta: float) -> Tensor:
    """``exp(-d^2 / theta^2)`` between `size` points of [0, 1]. shape: (size, size)"""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(((x.unsqueeze(-1) - x) / theta) ** 2))
