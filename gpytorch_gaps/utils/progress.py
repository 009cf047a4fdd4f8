"""Progress bars for work that takes longer than a few seconds, and sizes in a readable unit."""

import time
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

_DELAY_SECONDS = 3.0  # before a bar is shown
_enabled = True


def is_enabled() -> bool:
    """Whether bars are shown, as set by ``settings.progress``."""
    return _enabled


def set_enabled(value: bool) -> None:
    global _enabled
    _enabled = value


def with_bar(parts: Iterable[Any] | None, what: str, total: int | None = None, unit: str = "it") -> tqdm:
    """Iterates over `parts` with a bar that appears after some seconds; ``settings.progress(False)`` hides it.

    Without parts, the caller advances the bar with ``update(count)``.
    """
    return tqdm(
        parts,
        desc=what,
        total=total,
        unit=unit,
        delay=_DELAY_SECONDS,
        leave=False,
        disable=not is_enabled(),
        dynamic_ncols=True,
    )


class LateBar:
    """A counter whose bar appears after some seconds. Before that it costs nothing."""

    def __init__(self, what: str) -> None:
        self._what, self._count, self._started = what, 0, time.perf_counter()
        self._bar: tqdm | None = None

    def update(self) -> None:
        self._count += 1
        if self._bar is not None:
            self._bar.update()
        elif time.perf_counter() - self._started > _DELAY_SECONDS and is_enabled():
            self._bar = tqdm(desc=self._what, initial=self._count, leave=False, dynamic_ncols=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def format_bytes(count: float) -> str:
    """A number of bytes in a unit that suits its size.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
