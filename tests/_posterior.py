"""Random problems on grids, and their posteriors in dense extended precision."""

import math
from dataclasses import dataclass

import numpy as np
import torch

KERNELS = ("matern12", "matern32", "matern52", "se")
PATTERNS = ("none", "one gap", "one observation", "random", "few", "block", "slice", "block and random")
NOISES = tuple(10.0**k for k in range(-8, 1))


def kernel_matrix(kind, points, length):
    """float64, with entries that the package and the reference share."""
    distance = np.abs(points[:, None] - points) / length
    root = {"matern32": math.sqrt(3.0), "matern52": math.sqrt(5.0)}.get(kind, 1.0) * distance
    if kind == "se":
        return np.exp(-0.5 * distance**2)
    polynomial = {"matern12": 1.0, "matern32": 1.0 + root, "matern52": 1.0 + root + root**2 / 3.0}[kind]
    return polynomial * np.exp(-root)


def observed_mask(pattern, shape, rng):
    mask = np.ones(shape, dtype=bool)
    flat = mask.reshape(-1)
    if pattern == "one gap":
        flat[rng.integers(flat.size)] = False
    elif pattern == "one observation":
        flat[:] = False
        flat[rng.integers(flat.size)] = True
    elif pattern in ("random", "few"):
        flat[rng.random(flat.size) < (0.97 if pattern == "few" else rng.uniform(0.05, 0.8))] = False
    if pattern.startswith("block"):
        mask[tuple(slice(start := rng.integers(m), start + max(1, m // 2)) for m in shape)] = False
    if pattern == "block and random":
        flat[rng.random(flat.size) < 0.3] = False
    if pattern == "slice":
        axis = rng.integers(len(shape))
        mask[(slice(None),) * axis + (rng.integers(shape[axis]),)] = False
    if not mask.any():
        flat[rng.integers(flat.size)] = True
    return mask


@dataclass
class Problem:
    """Data on a grid, from the model itself or from a smooth function, perhaps far away from zero."""

    seed: int
    axes: list
    kernels: list  # (kind, length-scale) of each axis
    noise: float
    values: np.ndarray  # NaN in the gaps
    dtype: str

    @classmethod
    def random(cls, seed, largest=240):
        rng = np.random.default_rng(seed)
        dims = int(rng.integers(1, 5))
        shape = [int(rng.integers(2, max(3, 1.6 * largest ** (1.0 / dims)))) for _ in range(dims)]
        while math.prod(shape) > largest:
            shape[int(np.argmax(shape))] -= 1
        axes = [np.linspace(0.0, 1.0, m) for m in shape]
        kernels = [(str(rng.choice(KERNELS)), 10.0 ** rng.uniform(-1.3, 0.3)) for _ in shape]
        noise = float(rng.choice(NOISES))
        field = rng.standard_normal(shape)
        if rng.random() < 0.7:  # a draw of the model
            for axis, (x, (kind, length)) in enumerate(zip(axes, kernels, strict=True)):
                values, vectors = np.linalg.eigh(kernel_matrix(kind, x, length))
                root = vectors * np.sqrt(values.clip(0.0))
                field = np.moveaxis(np.tensordot(root, field, (1, axis)), 0, axis)
        else:
            field = sum(np.sin(5.0 * (i + 1) * x).reshape([-1 if k == i else 1 for k in range(dims)])
                        for i, x in enumerate(axes)) + np.zeros(shape)  # fmt: skip
        field = field + math.sqrt(noise) * rng.standard_normal(shape) + float(rng.choice([0.0, 0.0, 300.0]))
        dtype = str(rng.choice(["float64", "float64", "float32"]))
        field = field.astype(dtype).astype(np.float64)
        field[~observed_mask(str(rng.choice(PATTERNS)), tuple(shape), rng)] = np.nan
        return cls(seed, axes, kernels, noise, field, dtype)

    @property
    def factors(self):
        return [kernel_matrix(kind, x, length) for x, (kind, length) in zip(self.axes, self.kernels, strict=True)]

    @property
    def index(self):
        return np.flatnonzero(~np.isnan(self.values))

    @property
    def y(self):
        return self.values.reshape(-1)[self.index]

    def tensors(self, dtype=torch.float64):
        return [torch.from_numpy(factor).to(dtype) for factor in self.factors]


def exact_posterior(factors, index, noise, y):
    """Mean and standard deviation of f at every cell, in extended precision.

    :param noise: one variance, or one for each observation.
    """
    kernel = np.ones((1, 1), dtype=np.longdouble)
    for factor in factors:
        kernel = np.kron(kernel, np.asarray(factor, dtype=np.longdouble))
    rows = kernel[:, index]
    system = rows[index] + np.diag(np.broadcast_to(np.asarray(noise, dtype=np.longdouble), len(index)))
    half, y = _forward(system, np.column_stack([rows.T, np.asarray(y, dtype=np.longdouble)]))
    mean = half.T @ y
    variance = np.diagonal(kernel) - np.square(half).sum(0)
    return mean.astype(np.float64), np.sqrt(variance.clip(1e-30)).astype(np.float64)


def _forward(system, columns):
    """``L^-1 columns`` for ``L L' = system``, the last column apart; both are worked on in place, column by column."""
    lower, size = system.copy(), len(system)
    for k in range(size):
        pivot = np.sqrt(lower[k, k])
        columns[k] /= pivot
        if k + 1 < size:
            lower[k + 1 :, k] /= pivot
            column = lower[k + 1 :, k]
            lower[k + 1 :, k + 1 :] -= np.outer(column, column)
            columns[k + 1 :] -= np.outer(column, columns[k])
    return columns[:, :-1], columns[:, -1]
