"""Mean, standard deviations and gaps of a streamed filling, in the form of the input, slab by slab."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, write_gaps
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.checking.calibration import Check
from gpytorch_gaps.filling.checking.factors import factors
from gpytorch_gaps.reconstruction.result import Reconstruction
from gpytorch_gaps.utils.dtypes import is_gap

_WRITTEN_SLAB_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class SlabFields:
    """The results for an array from its reconstruction.

    :param adapter: the array.
    :param targets: the gaps that are filled.
    :param smooth: whether observed values are replaced too.
    :param result: the reconstruction of the whole array.
    :param noise: variance of the noise of a measurement.
    :param factor: factor on all standard deviations.
    :param check: the held-out check that calibrates them, if there is one.
    """

    adapter: ArrayAdapter
    targets: Targets
    smooth: bool
    result: Reconstruction
    noise: float
    factor: float
    check: Check | None = None

    @property
    def has_std(self) -> bool:
        return self.result.report.num_draws > 0

    def computed(self) -> tuple[Any, Any, Any]:
        """Mean, standard deviations and flags of the gaps."""
        shape = self.adapter.shape
        dtype = np.float32 if self.result.dtype == torch.float32 else np.float64
        filled, gaps = np.empty(shape, dtype), np.empty(shape, dtype=bool)
        std = np.empty(shape, dtype) if self.has_std else None
        step = max(1, _WRITTEN_SLAB_CELLS // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            held = self.adapter.array[rows]
            filled[rows], gaps[rows] = self._mean(held, start)
            if std is not None:
                std[rows] = self._std(held, start)
        mean = self.adapter.wrap_filled(filled, gaps, self.smooth)
        return mean, None if std is None else self.adapter.wrap_like_input(std), self.adapter.wrap_like_input(gaps)

    def in_chunks(self) -> tuple[Any, Any, Any]:
        """Mean, standard deviations and flags of the gaps as lazy dask arrays."""
        array = self.adapter.array
        whole = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))

        def lazy(work: Callable[[np.ndarray, int], np.ndarray], dtype: Any) -> Any:
            def block(held: np.ndarray, block_info: Any = None) -> np.ndarray:
                return work(held, block_info[0]["array-location"][0][0]) if block_info else held.astype(dtype)

            return whole.map_blocks(block, dtype=dtype, meta=np.empty((0,) * array.ndim, dtype))

        def filled(held: np.ndarray, start: int) -> np.ndarray:
            return write_gaps(held, *self._mean(held, start), self.smooth)

        mean, gaps = lazy(filled, array.dtype), lazy(lambda held, start: self._gaps(held, start)[1], bool)
        std = self.adapter.wrap_like_input(lazy(self._std, np.float64)) if self.has_std else None
        return self.adapter.given.copy(data=mean), std, self.adapter.wrap_like_input(gaps)

    def _gaps(self, held: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Flags of all gaps in slices of the first axis with the values `held`, and of the gaps that are filled."""
        unknown = is_gap(held)
        if self.targets.are_all:
            return unknown, unknown
        return unknown, unknown & self.targets.rows(start, start + len(held))

    def _mean(self, held: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The mean, NaN at gaps that are not filled, and flags of the gaps that are filled."""
        mean = self.result.slab(start, start + len(held)).cpu().numpy()
        if self.adapter.limits is not None:
            mean = mean.clip(*self.adapter.limits)
        unknown, gaps = self._gaps(held, start)
        return np.where(unknown & ~gaps, np.nan, mean).astype(mean.dtype), gaps

    def _std(self, held: np.ndarray, start: int) -> np.ndarray:
        """Standard deviations of measurements in gaps, or of the field everywhere; NaN at gaps that are not filled."""
        unknown, gaps = self._gaps(held, start)
        variance = self.result.variance_slab(start, start + len(held)).double().cpu().numpy()
        calibration = 1.0 if self.check is None else factors(self.check, np.sqrt(variance + self.noise))
        std = self.factor * calibration * np.sqrt(variance + (0.0 if self.smooth else self.noise))
        elsewhere = np.where(unknown, np.nan, std if self.smooth else 0.0)
        return np.where(gaps, std, elsewhere)
