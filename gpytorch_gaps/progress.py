"""A bar for what takes longer than a few seconds."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

from gpytorch_gaps import settings

_PATIENCE = 3.0  # seconds without a bar


def with_bar(parts: Iterable[Any] | None, what: str, total: int | None = None, unit: str = "it") -> tqdm:
    """The parts, with a bar once they have taken some seconds; ``settings.progress(False)`` silences it.

    Without parts, a bar whose owner says ``update(count)``.
    """
    return tqdm(
        parts,
        desc=what,
        total=total,
        unit=unit,
        delay=_PATIENCE,
        leave=False,
        disable=not settings.progress.value(),
        dynamic_ncols=True,
    )
