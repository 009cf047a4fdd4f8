"""The p x p matrix of the inversion lemma: its factor, its square roots, and what it costs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.gram import pair_flops
from gpytorch_gaps.linalg.products import kron_matmul_flops

_LIFTS = (1.0, 1e1, 1e2, 1e3, 1e4)  # factors on the diagonal that are tried while rounding makes the matrix indefinite


def factorise_lifted(core: Tensor, number: Tensor) -> tuple[Tensor, float, float]:
    """The Cholesky factor of ``I + M``, the lift, and `number` as a float.

    If rounding makes ``I + M`` indefinite, the factor is that of ``I + M / lift``. The host waits for a device once: it
    reads `number` together with the success of the factorisation.
    """
    eye = torch.eye(core.size(-1), dtype=core.dtype, device=core.device)
    for lift in _LIFTS:
        factor, info = torch.linalg.cholesky_ex(core if lift == 1.0 else eye + (core - eye) / lift)
        failed, value = torch.stack([info.any().double(), number]).tolist()
        if not failed:
            return factor, lift, value
    raise ValueError(
        f"noise: too small for a preconditioner: {core.size(-1)} eigenvectors have eigenvalues of up to "
        f"{float(core.amax()):.1e} times the noise, expected below 1e16, and finite; try more noise, or "
        "preconditioner_rank(0)"
    )


def same_batch(*matrices: Tensor) -> list[Tensor]:
    batch = torch.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return [matrix.expand(*batch, *matrix.shape[-2:]) for matrix in matrices]


def low_rank_flops(shapes: Sequence[tuple[int, int]], rank: int) -> tuple[float, float]:
    """FLOPs of setting up, and of applying to one column, from the shapes (m_i, columns in use) of the eigenvectors."""
    return min(pair_flops(shapes, rank)) + rank**3 / 3.0, 2.0 * kron_matmul_flops(shapes, 1) + 2.0 * rank**2


def lifted_root(coefficients: Tensor) -> Tensor:
    """``sqrt(c)``, with zeros raised by a constant: a root at zero has no derivative, and a clamp would drop it."""
    floor = torch.finfo(coefficients.dtype).tiny ** 0.5
    return (coefficients + (coefficients.detach().clamp_min(floor) - coefficients.detach())).sqrt()
