"""Fill-gaps in plain NumPy and SciPy: a peer for the package's solves."""

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg


def _kronecker(matrices: list[np.ndarray], grid: np.ndarray) -> np.ndarray:
    """``(F_1 x ... x F_d) grid``: every product turns its axis to the end, so that d of them restore the order."""
    for matrix in matrices:
        grid = grid.reshape(len(matrix), -1).T @ matrix.T
    return grid.reshape([len(matrix) for matrix in matrices])


def _eigh_of_each(factors: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The eigenvalues and the eigenvectors of the factors; equal ones are decomposed once."""
    distinct = {factor.tobytes(): factor for factor in factors}
    eigen = {key: np.linalg.eigh(factor) for key, factor in distinct.items()}
    each = [eigen[factor.tobytes()] for factor in factors]
    return [values for values, _ in each], [vectors for _, vectors in each]


def numpy_fill(
    factors: list[np.ndarray],
    observed: np.ndarray,
    values: np.ndarray,
    noise: float,
    tolerance: float,
    cap: int = 10_000,
) -> tuple[np.ndarray, int]:
    """``a`` with ``(K_XX + s2 I) a = y`` on the grid, zero in the gaps, and the iterations of conjugate gradients.

    ``V A^-1 V' y_Z = -V A^-1 W' y_X`` with ``A = K + s2 I = Q (T + s2) Q'``, then ``a = A^-1 y``: Proposition 3.3.
    Iterations reduce the residual in the gaps, ``r = -a_Z``. The goal is a tolerance of the original residual,
    ``|(K_XX + s2 I) a_X - y| <= tolerance |y|``. The ratio of both before the first iteration determines when to stop.
    If it has grown, conjugate gradients start again for the correction. ``RuntimeError`` if this takes more than `cap`
    iterations.
    """
    eigenvalues, vectors = _eigh_of_each(factors)
    transposed = [each.T for each in vectors]
    spectrum = np.ones(())
    for axis in eigenvalues:
        spectrum = np.multiply.outer(spectrum, axis)
    inverse = 1 / (np.maximum(spectrum, 0) + noise)

    gaps = np.flatnonzero(~observed)
    filled = np.where(observed, values, 0.0)
    enough = tolerance * np.linalg.norm(filled)
    scratch = np.zeros(filled.size)
    iterations = 0

    def solve(grid: np.ndarray) -> np.ndarray:
        """``A^-1 grid``"""
        return _kronecker(vectors, _kronecker(transposed, grid) * inverse)

    def gap_product(vector: np.ndarray) -> np.ndarray:
        """``V A^-1 V' vector``"""
        scratch[gaps] = vector
        return solve(scratch).take(gaps)

    def count(_: np.ndarray) -> None:
        nonlocal iterations
        iterations += 1

    operator = LinearOperator((len(gaps), len(gaps)), matvec=gap_product, dtype=np.float64)
    while True:
        a = solve(filled)
        residual = -a.take(gaps)
        a[~observed] = 0.0
        original = np.linalg.norm((_kronecker(factors, a) + noise * a - filled)[observed])
        if original <= enough:
            return a, iterations
        if iterations >= cap:
            raise RuntimeError(f"the residual is {original / enough:.1e} tolerances after {iterations} iterations")
        aim = 0.9 * np.linalg.norm(residual) * enough / original
        correction, _ = cg(operator, residual, rtol=0.0, atol=aim, maxiter=cap - iterations, callback=count)
        filled.reshape(-1)[gaps] += correction
