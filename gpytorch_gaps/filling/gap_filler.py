"""``GapFiller``: fills the gaps of tables, as a transformer of scikit-learn.

The table is an array of two axes: rows along an ordered axis, columns as labels. ``fit`` chooses and trains the model
of :func:`gpytorch_gaps.fill_gaps`. ``transform`` conditions it on the training table and on the observations in further
rows, and predicts the gaps of these rows.
"""

from dataclasses import replace
from typing import Any, Self

import numpy as np

try:
    from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("GapFiller needs scikit-learn: pip install 'gpytorch-gaps[sklearn]'") from error

from gpytorch_gaps.filling.arrays.adapters import adapt
from gpytorch_gaps.filling.arrays.grid_values import GridValues
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.axes.index_grid import is_a
from gpytorch_gaps.filling.fill import fit_in_memory
from gpytorch_gaps.filling.results.fitted import Fitted

_INDEX = "index"  # value of `coordinates` for the index of a DataFrame


class GapFiller(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Fills the NaN of a table with the posterior mean of an exact Gaussian process: a transformer of scikit-learn.

    Rows are samples along an ordered axis, such as time. Columns are labels, and their covariances are learned. Unlike
    other imputers, this one uses the order of the rows and the distances between them.

    Values of further rows are predicted from the training table and from the observations in these rows. Without
    `coordinates`, rows other than those of the training table are assumed to follow it. Observed values are unchanged.

    :param coordinates: coordinates of the rows on their axis. None: row i is at i. The name or number of a column: its
        numbers; the column is returned unchanged. ``"index"``: the index of a DataFrame, numbers or dates.
    :param kernels: as in :func:`gpytorch_gaps.fill_gaps`, for the axes 0 (rows) and 1 (columns).
    :param periods: as in :func:`gpytorch_gaps.fill_gaps`.
    :param trend: as in :func:`gpytorch_gaps.fill_gaps`.
    :param check: whether to withhold some observations and predict them, for ``score_``.
    :param steps: largest number of optimizer steps.
    :param memory: bytes that the covariance matrices of an axis may take.
    :param data_transform: `transform` of :func:`gpytorch_gaps.fill_gaps`. Filled values are then medians.
    :param bounds: as in :func:`gpytorch_gaps.fill_gaps`.
    :param random_state: seed of all random choices: an integer, a ``RandomState``, or None for a new seed each time.
    :param progress: whether to show progress bars.

    ``fit`` sets these attributes: `score_`, the :class:`Score` of the withheld observations, or None; `level_`, the
    mean of all observations; `n_features_in_`; and `feature_names_in_`, if columns have names. `fitted_` is internal.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> table = np.sin(np.arange(30.0) / 4)[:, None] * [1.0, 2.0]
    >>> table[10:13, 0] = np.nan
    >>> filler = gaps.GapFiller(steps=5, check=False)
    >>> filled = filler.fit_transform(table)
    >>> filled.shape, bool(np.isfinite(filled).all())
    ((30, 2), True)
    >>> mean, std = filler.predict(table, return_std=True)
    >>> bool((std[10:13, 0] > 0).all()), float(std[0, 0])
    (True, 0.0)
    """

    def __init__(
        self,
        *,
        coordinates: Any = None,
        kernels: Any = "auto",
        periods: Any = None,
        trend: bool = True,
        check: bool = True,
        steps: int = 40,
        memory: float = 2**32,
        data_transform: Any = None,
        bounds: Any = None,
        random_state: Any = 0,
        progress: bool = False,
    ) -> None:
        self.coordinates = coordinates
        self.kernels = kernels
        self.periods = periods
        self.trend = trend
        self.check = check
        self.steps = steps
        self.memory = memory
        self.data_transform = data_transform
        self.bounds = bounds
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: Any, y: Any = None) -> Self:
        """Chooses and trains a model.

        :param X: the training table (n, f), NaN at gaps.
        :param y: not used.
        :return: this object.
        :raises ValueError: if values are infinite, a column has no observation, or coordinates are not distinct.
        """
        rows, values = self._read(X, reset=True)
        empty = np.isnan(values).all(axis=0)
        if empty.any():
            names = ", ".join(self._labels()[at] for at in np.flatnonzero(empty))
            raise ValueError(f"X: got no observation in {names}, expected one or more in each column. Try: drop these")
        options = Options(
            kernels=self.kernels,
            periods=self.periods,
            trend=self.trend,
            check=self.check,
            steps=self.steps,
            memory=self.memory,
            transform=self.data_transform,
            bounds=self.bounds,
            seed=self._seed(),
            progress=self.progress,
            smooth=True,  # a table without gaps has a model too
        )
        one_column = values.shape[1] == 1
        axes = [rows] if one_column else [rows, self._labels()]
        self.fitted_ = fit_in_memory(adapt(values[:, 0] if one_column else values, axes), options)
        self.score_ = None if self.fitted_ is None or self.fitted_.check is None else self.fitted_.check.score
        self.level_ = float(np.nanmean(values))
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Fills the NaN of a table, the training table or further rows.

        :param X: a table (m, f) with the columns of the training table.
        :return: the table without NaN.
        :raises ValueError: if columns differ, values are infinite, or coordinates are not distinct.
        """
        return self.predict(X)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Fills the NaN of a table, and returns the uncertainty of the filled values.

        :param X: as in :meth:`transform`.
        :param return_std: whether to return standard deviations too: of measurements in gaps, 0 at observed values.
        :return: the table without NaN; with `return_std`, the table and the standard deviations.
        """
        check_is_fitted(self)
        rows, values = self._read(X, reset=False)
        gaps = np.isnan(values)
        mean, std = values.copy(), np.zeros_like(values)
        if gaps.any():
            nothing_learned = (self.level_, np.nan)
            mean[gaps], std[gaps] = _predict_gaps(self.fitted_, rows, values) if self.fitted_ else nothing_learned
        column = self._column()
        if column is not None:
            mean, std = np.insert(mean, column, rows, axis=1), np.insert(std, column, 0.0, axis=1)
        return (mean, std) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _read(self, X: Any, reset: bool) -> tuple[Any, np.ndarray]:
        """The coordinates of the rows, None for their positions, and the values (n, f) of the other columns."""
        by_index = self._is_by_index()
        if by_index and not is_a(X, "pandas", "DataFrame"):
            raise ValueError(f"coordinates: got 'index' with a table of type {type(X).__name__}, expected a DataFrame")
        values = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")
        column = self._column()
        if column is None:
            return (X.index if by_index else None), values
        if values.shape[1] < 2:
            raise ValueError("X: got only the column of coordinates, expected columns to fill as well")
        return values[:, column], np.delete(values, column, axis=1)

    def _is_by_index(self) -> bool:
        return isinstance(self.coordinates, str) and self.coordinates == _INDEX

    def _column(self) -> int | None:
        """The number of the column of coordinates, if there is one."""
        if self.coordinates is None or self._is_by_index():
            return None
        names = list(getattr(self, "feature_names_in_", []))
        if isinstance(self.coordinates, str) and self.coordinates in names:
            return names.index(self.coordinates)
        count = self.n_features_in_
        if isinstance(self.coordinates, int | np.integer) and -count <= self.coordinates < count:
            return int(self.coordinates) % count
        known = names or f"0 to {count - 1}"
        raise ValueError(f"coordinates: got {self.coordinates!r}, expected a column, one of {known}, 'index', or None")

    def _labels(self) -> list[str]:
        """The names of the columns that are filled."""
        names = [str(name) for name in self.get_feature_names_out()]
        column = self._column()
        return names if column is None else names[:column] + names[column + 1 :]

    def _seed(self) -> int:
        given = self.random_state
        return int(given) if isinstance(given, int | np.integer) else check_random_state(given).randint(2**31)


def _predict_gaps(fitted: Fitted, rows: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the gaps of some rows, in grid order, given these rows and the training table."""
    gaps = np.isnan(values)
    if values.shape[1] == 1:
        values, gaps = values[:, 0], gaps[:, 0]
    filling, (axis, *others) = fitted.filling, fitted.axes
    own = _points(fitted, rows, values)
    points, where = np.unique(np.concatenate([axis.points, own]), axis=0, return_inverse=True)
    known, at = np.split(where.reshape(-1), [axis.size])
    if len(np.unique(at)) < len(at):
        raise ValueError(f"X: got {len(at)} rows, some of them at the same coordinate; expected distinct ones")
    table, noise = (np.full((len(points), *values.shape[1:]), empty) for empty in (np.nan, 0.0))
    table[known], noise[known] = filling.numbers, 0.0 if filling.source.noise is None else filling.source.noise
    latent, variance = filling.latent(values)
    table[at], noise[at] = np.where(gaps, table[at], latent), np.where(gaps, noise[at], variance)
    axes = [replace(axis, points=points, coordinates=None), *others]
    part = GridValues.in_memory(table, axes, noise=noise if noise.any() else None).whole()
    cells = np.argwhere(gaps)
    cells[:, 0] = at[cells[:, 0]]
    conditioned = replace(fitted, model=fitted.chosen.conditioned(part))
    found = conditioned.at([one.points[column] for one, column in zip(axes, cells.T, strict=True)], noise=True)
    return found.median, found.std


def _points(fitted: Fitted, rows: Any, values: np.ndarray) -> np.ndarray:
    """Points of the rows. Rows without coordinates follow the training table, unless they are its rows."""
    if rows is not None:
        return fitted.axes[0].encode(rows)
    training = fitted.adapter.given
    start = 0 if np.array_equal(values, training, equal_nan=True) else len(training)
    return np.arange(start, start + len(values), dtype=np.float64).reshape(-1, 1)
