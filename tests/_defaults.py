"""Defaults of GPyTorch and linear_operator that ``import botorch`` changes for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
import linear_operator

CHANGED_BY_BOTORCH = [
    (linear_operator.settings._fast_covar_root_decomposition, "_default"),
    (linear_operator.settings._fast_log_prob, "_default"),
    (linear_operator.settings._fast_solves, "_default"),
    (linear_operator.settings.cholesky_max_tries, "_global_value"),
    (linear_operator.settings.max_cholesky_size, "_global_value"),
    (gpytorch.settings.max_eager_kernel_size, "_global_value"),
]


@contextmanager
def defaults_kept() -> Iterator[None]:
    """Restores them at the end: other tests run in the same process."""
    before = [getattr(owner, name) for owner, name in CHANGED_BY_BOTORCH]
    try:
        yield
    finally:
        for (owner, name), value in zip(CHANGED_BY_BOTORCH, before, strict=True):
            setattr(owner, name, value)
