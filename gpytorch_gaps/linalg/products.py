"""Products with Kronecker matrices, one axis at a time.

A vector over a grid is a tensor with one axis per factor, the last axis fastest::

    (F_1 ⊗ ... ⊗ F_d) x   =   F_1 ×_1 (F_2 ×_2 (... F_d ×_d x)),       x: (m_1, ..., m_d)

The axes commute. Each costs one matrix product, and the ``M × M`` matrix is never formed.

>>> A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(3)
>>> x = torch.arange(6.0).unsqueeze(-1)
>>> torch.equal(kron_matmul([A, B], x), torch.kron(A, B) @ x)
True
"""

from collections.abc import Iterable, Sequence
from math import inf, prod

import torch
from torch import Tensor

from gpytorch_gaps.linalg.factors import Basis, Factor, all_dense, operator_product_flops

# Numbers in a block of `_blocked`: one or two MB, which stay in cache, and a millisecond of work, enough for threads.
_BLOCK_NUMBERS = 2**18
# A batched product of matrices with fewer rows runs at a fraction of the rate of one large product.
_MIN_BATCHED_ROWS = 32
# Entries below this fraction of the largest entry do not matter in float32.
_NEGLIGIBLE_FRACTION = 1e-12
# Below this number of cells, calling a product takes as long as its arithmetic.
_SMALL_GRID_CELLS = 2**15


def kron_matmul(factors: Sequence[Factor | Basis], x: Tensor) -> Tensor:
    """``(F_1 ⊗ ... ⊗ F_d) x`` in ``O(M Σ m_i)``, for square or rectangular factors; batches broadcast as in ``matmul``.

    :param factors: F_i, matrices or operators, shape (*batch, q_i, m_i) each.
    :param x: right-hand sides, shape (*batch, M, C) with M = prod m_i, the last axis fastest.
    :return: shape (*batch, Q, C) with Q = prod q_i. It may be a transposed view, ``(C, Q)`` in memory; another product
        takes such a view without a copy.
    :raises ValueError: if the number of rows of x is not M.
    """
    shapes = [(f.shape[-2], f.shape[-1]) for f in factors]
    size, num_rhs = x.shape[-2:]
    if size != prod([m for _, m in shapes]):
        raise ValueError(f"factors of shapes {shapes} do not apply to {size} rows")

    if not all_dense(factors):
        return _in_order(factors, x, _cheapest_order(shapes))
    is_image = num_rhs == 1 and len(factors) == 2 and x.dim() == 2 and all(f.dim() == 2 for f in factors)
    if is_image and size < _SMALL_GRID_CELLS:
        return _two_axes(factors[0], factors[1], x)
    if num_rhs > 1 and x.mT.is_contiguous():
        # Contiguous columns are a batch of grids: nothing is moved in memory.
        columns = kron_matmul([f.unsqueeze(-3) if f.dim() > 2 else f for f in factors], x.mT.unsqueeze(-1))
        return columns.squeeze(-1).mT  # shape: (*batch, Q, C)

    order = _cheapest_order(shapes)
    if order != sorted(order):
        return _in_order(factors, x, order)
    if _blocks_pay(factors, x):
        return _blocked(factors, x)
    return _rotated(factors, x).mT


def _two_axes(first: Tensor, last: Tensor, x: Tensor) -> Tensor:
    """``F_1 X F_2'``, the cheaper side first, in as few calls as possible, for small grids."""
    (q, m), (s, n) = first.shape, last.shape
    image = x.reshape(m, n)
    product = (first @ image) @ last.mT if n * q * (m + s) <= m * s * (n + q) else first @ (image @ last.mT)
    return product.view(-1, 1)


def kron_matmul_flops(shapes: Sequence[tuple[int, int]], num_rhs: int = 1) -> int:
    """FLOPs of :func:`kron_matmul`: ``Σ_i 2 q_i m_i left_i right_i`` over the axes in the order taken.

    :param shapes: (q_i, m_i) of each factor.
    :param num_rhs: C, the number of right-hand sides.
    """
    sizes = [m for _, m in shapes]
    flops = 0
    for i in _cheapest_order(shapes):
        sizes[i] = shapes[i][0]
        flops += 2 * shapes[i][1] * prod(sizes) * num_rhs
    return flops


def product_flops(factors: Sequence[Factor | Basis], num_rhs: int = 1) -> float:
    """FLOPs of :func:`kron_matmul`; of operators, as many as take the same time."""
    shapes = [(factor.size(-2), factor.size(-1)) for factor in factors]
    if all_dense(factors):
        return float(kron_matmul_flops(shapes, num_rhs))
    return operator_product_flops(factors, _cheapest_order(shapes), num_rhs)


def kron_diagonal(diagonals: Sequence[Tensor]) -> Tensor:
    """Diagonal of ``diag(v_1) ⊗ ... ⊗ diag(v_d)``, of shape ``(*batch, M)`` for vectors of shapes ``(*batch, m_i)``."""
    result, *rest = diagonals
    for v in rest:
        result = (result.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)
    return result  # shape: (*batch, M)


def cast_without_denormals(matrix: Factor, dtype: torch.dtype) -> Factor:
    """A factor in another precision. In float32, entries far below the rounding of the largest become zero.

    Kernels with short length-scales have many such entries. Their products are denormal numbers, which slow down a CPU
    by a factor of ten.
    """
    if not torch.is_tensor(matrix) or dtype in (matrix.dtype, torch.float64) or not matrix.numel():
        return matrix.to(dtype)
    floor = _NEGLIGIBLE_FRACTION * matrix.abs().amax((-2, -1), keepdim=True)
    return matrix.masked_fill(matrix.abs() < floor, 0.0).to(dtype)


def _cheapest_order(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Axes by increasing ``1/m_i - 1/q_i``: those that shrink come first, those that grow come last.

    Let axis j follow axis i, and let S be the size of all other axes. Exchanging the two does not change the cost of
    the others. Together, the two cost with i first, and with j first::

        2 S (q_i m_i m_j + q_i q_j m_j)   <=   2 S (q_j m_j m_i + q_i q_j m_i)

    Divided by ``2 S q_i m_i q_j m_j`` this is ``1/m_i - 1/q_i <= 1/m_j - 1/q_j``. An order is optimal if and only if
    no exchange of neighbours is cheaper, that is, if it is sorted. Square factors tie and keep their order.
    """

    def growth(i: int) -> float:
        q, m = shapes[i]
        if q == 0:
            return -inf
        return (q - m) / (q * m) if m else inf

    return sorted(range(len(shapes)), key=growth)


def _rotated(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """The product as ``(*batch, C, Q)``: each step is one large matrix product that also moves its axis to the end.

    ::

        Y_i = Y_{i-1}ᵀ F_iᵀ :  (m_i, m_{i+1}...m_d C q_1...q_{i-1})  ->  (m_{i+1}...m_d C q_1...q_{i-1}, q_i)

    After d steps the axes are in their original order, and only the right-hand sides have changed place. A matrix
    product reads a transposed operand at no cost, so nothing is permuted in memory.
    """
    num_rhs = x.shape[-1]
    sizes = [*(f.shape[-1] for f in factors), num_rhs]
    for f in factors:
        m = sizes.pop(0)
        x = x.reshape(*x.shape[:-2], m, prod(sizes)).mT @ f.mT  # shape: (*batch, rest, q_i)
        sizes.append(f.shape[-2])
    return x.reshape(*x.shape[:-2], num_rhs, prod(sizes[1:]))


def _blocked(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Multiplies the first axis in one large product, and the others as in :func:`_rotated`, by blocks of rows.

    New memory is as expensive as arithmetic here: the first access to a page costs as much as about a hundred FLOPs
    per number. The blocks share scratch memory and are written back in place, so only the result has its size.
    """
    first, *others = factors
    size, new_size = prod(f.shape[-1] for f in others), prod(f.shape[-2] for f in others)
    num_rhs = x.shape[-1]
    y = first @ x.reshape(*x.shape[:-2], first.shape[-1], size * num_rhs)
    rows = y.view(-1, size, num_rhs)  # shape: (batch * q_1, m_2...m_d, C)
    result = rows if new_size == size else rows.new_empty(len(rows), new_size, num_rhs)

    widest = prod(max(f.shape[-2:]) for f in others) * num_rhs
    step = max(1, _BLOCK_NUMBERS // widest)
    scratch = rows.new_empty(2, min(step, len(rows)) * widest)
    transposed = [f.mT.contiguous() for f in others]
    for source, target in zip(rows.split(step), result.split(step), strict=True):
        z, n = source, len(source)
        for i, f in enumerate(transposed):
            m, q = f.shape
            z = z.view(n, m, -1).mT
            # beta=0 ignores `out`; `bmm(..., out=)` does not support forward-mode derivatives and `vmap`.
            out = scratch[i % 2, : n * z.shape[1] * q].view(n, z.shape[1], q)
            z = out.baddbmm_(z, f.expand(n, m, q), beta=0)  # shape: (n, rest, q_i)
        target.copy_(z.view(n, num_rhs, new_size).mT)
    return result.view(*y.shape[:-2], first.shape[-2] * new_size, num_rhs)


def _blocks_pay(factors: Sequence[Tensor], x: Tensor) -> bool:
    """Whether to work in blocks: only on large grids, and not under autograd, which keeps all intermediates."""
    others = factors[1:]
    if x.device.type != "cpu" or x.numel() <= _BLOCK_NUMBERS or any(f.dim() > 2 for f in others):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *factors)):
        return False
    if len(others) < 2 or any(f.numel() == 0 for f in factors):
        return False
    sizes = [min(f.shape) for f in others]
    return prod(sizes) * x.shape[-1] >= _MIN_BATCHED_ROWS * max(sizes)


def _in_order(factors: Sequence[Factor | Basis], x: Tensor, order: Iterable[int]) -> Tensor:
    """The axes in a given order, each in place: ``F_i`` times each of the ``left`` matrices ``(m_i, right)``."""
    num_rhs = x.shape[-1]
    sizes = [f.shape[-1] for f in factors]
    x = x.flatten(-2)  # shape: (*batch, M * C)
    for i in order:
        f, left, right = factors[i], prod(sizes[:i]), prod(sizes[i + 1 :]) * num_rhs
        sizes[i], m = f.shape[-2:]
        y = x.reshape(*x.shape[:-1], left, m, right)
        if not torch.is_tensor(f) and f.dim() > 2:
            y = f._matmul(y.movedim(-2, -3).flatten(-2)).unflatten(-1, (left, right)).movedim(-3, -2)
        elif not torch.is_tensor(f):
            y = f._matmul(y)
        elif right >= _MIN_BATCHED_ROWS and f.dim() == 2:
            y = f @ y  # shape: (*batch, left, q_i, right)
        else:  # copies for one large product are cheaper; a batch of factors is not repeated `left` times
            y = y.mT.reshape(*x.shape[:-1], left * right, m) @ f.mT
            y = y.reshape(*y.shape[:-2], left, right, sizes[i]).mT
        x = y.flatten(-3)
    return x.reshape(*x.shape[:-1], prod(sizes), num_rhs)
