"""How standard deviations are found in reasonable time: exactly where that is cheap, else from samples."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpytorch_gaps import settings
from gpytorch_gaps.reports import SolveReport

_EXACT_FLOPS = 5e11  # that exact ones may take: some seconds
_SAMPLED_FLOPS = 6e12  # that samples should not take much more than: a minute or two on two cores
_OF_A_MEAN = 0.7  # what a draw takes, to a tenth of the residual


@contextmanager
def in_reasonable_time(solve: SolveReport | None, points: int, most_samples: int = 64) -> Iterator[None]:
    """Settings for the variances of `points`, by what the solve of the mean took.

    A factor that is there serves all points; other solves are made anew for each.
    """
    each = 0.0 if solve is None or solve.method == "cholesky" else solve.flops
    fewest = settings.variance_samples.minimum
    samples = int(min(most_samples, max(fewest, _SAMPLED_FLOPS / max(_OF_A_MEAN * each, 1.0))))
    method = "auto" if each * points <= _EXACT_FLOPS else "pathwise"
    with settings.variance_method(method), settings.variance_samples(samples):
        yield
