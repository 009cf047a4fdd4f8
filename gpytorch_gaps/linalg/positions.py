"""Places of the levels of regular axes on their circles: a tensor, or a number for the first places."""

from collections.abc import Sequence

import torch
from torch import Tensor

Positions = int | Tensor


def axes_of(num_dense: int, positions: Sequence[Positions]) -> tuple[int, ...]:
    return *([num_dense] if num_dense > 1 else []), *map(count, positions)


def count(positions: Positions) -> int:
    return len(positions) if torch.is_tensor(positions) else positions


def places_of(cells: Tensor, positions: Sequence[Positions], dense: bool) -> list[Tensor]:
    """Place on every circle, after the level on the dense axis, of cells of the block."""
    found: list[Tensor] = []
    for number, own in enumerate(reversed(positions), start=1):
        last = number == len(positions) and not dense
        level = cells if last else cells % count(own)
        cells = cells if last else cells // count(own)
        found.append(own[level] if torch.is_tensor(own) else level)
    return [*([cells] if dense else []), *reversed(found)]


def same_positions(first: Positions, second: Positions) -> bool:
    if torch.is_tensor(first) and torch.is_tensor(second):
        return first is second or torch.equal(first, second)
    return not torch.is_tensor(first) and not torch.is_tensor(second) and first == second
