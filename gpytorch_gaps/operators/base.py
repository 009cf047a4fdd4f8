"""The base classes of operators with Kronecker factors, and checks of their arguments."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient, thin_bilinear_gradient
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.eigen import KroneckerEigen, factored_if_cheaper
from gpytorch_gaps.linalg.factors import Factor, leaf
from gpytorch_gaps.linalg.products import kron_matmul, product_flops
from gpytorch_gaps.operators.sums import add, as_diagonal, check_batches
from gpytorch_gaps.operators.upstream import solve_matrix
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import Work, sized


class KroneckerFactorsOperator(LinearOperator):
    """An operator with Kronecker factors as positional arguments, and indices and options as keywords.

    Factors may be batched. Keyword tensors, such as flat cell indices, are not, except for those that subclasses list
    in `_batched_kwargs`, which have the batch dimensions of the factors. With `out_dtype`, factors have a higher
    precision than results: the kernel of a float32 model is evaluated in float64. Products are in the precision of the
    right-hand side.
    """

    _batched_kwargs: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self._args

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that the factors are made of."""
        return tuple(map(leaf, self.factors))

    @property
    def dtype(self) -> torch.dtype:
        return self._kwargs.get("out_dtype") or self._args[0].dtype

    def _factors_for(self, x: Tensor) -> tuple[Factor, ...]:
        """The factors in the precision of x."""
        return tuple(factor.to(x.dtype) for factor in self.factors)

    @property
    def device(self) -> torch.device:
        return self._args[0].device

    def _factor_batch_shape(self) -> torch.Size:
        batched = [self._kwargs[name].shape[:-1] for name in self._batched_kwargs]
        return torch.broadcast_shapes(*(factor.shape[:-2] for factor in self.factors), *batched)

    def _rebuild(self, factor_map: Any, kwarg_map: Any = None) -> Any:
        """The same operator with a function applied to every factor and every batched keyword."""
        kwargs = dict(self._kwargs)
        for name in self._batched_kwargs:
            kwargs[name] = (kwarg_map or factor_map)(kwargs[name])
        return type(self)(*(factor_map(factor) for factor in self.factors), **kwargs)

    def _as_float64(self) -> Any:
        """The operator in float64 and detached, for solves."""
        return self.to(torch.float64)._rebuild(lambda t: t.detach())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> Any:
        return self._rebuild(
            lambda t: t.expand(*batch_shape, *t.shape[-2:]), lambda t: t.expand(*batch_shape, t.size(-1))
        )

    def _expanded(self) -> Any:
        """The operator with the full batch shape on every factor, so that batch indices apply to each."""
        return self._expand_batch(self.batch_shape)

    def _permute_batch(self, *dims: int) -> Any:
        lead = len(dims)
        return self._expanded()._rebuild(lambda t: t.permute(*dims, *range(lead, t.dim())))

    def _unsqueeze_batch(self, dim: int) -> Any:
        return self._expanded()._rebuild(lambda t: t.unsqueeze(dim))

    def _index_batch(self, batch_indices: tuple[Any, ...]) -> Any:
        return self._expanded()._rebuild(lambda t: t[batch_indices]) if batch_indices else self

    @full_float32()  # called in a backward pass, outside of other such blocks
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return super()._bilinear_derivative(left_vecs, right_vecs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts like :meth:`torch.Tensor.to`. Accepts device strings; indices stay integers."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(value: Any) -> Any:
            if isinstance(value, LinearOperator):
                return value.to(device=device, dtype=dtype)
            if not torch.is_tensor(value):
                return value
            return value.to(device, dtype if value.is_floating_point() else None, non_blocking)

        moved = {name: move(value) for name, value in self._kwargs.items()}
        if dtype is not None and moved.get("out_dtype") is not None:
            moved["out_dtype"] = None  # results get the dtype of the factors
        return type(self)(*(move(factor) for factor in self.factors), **moved)


class KroneckerCovarianceOperator(KroneckerFactorsOperator):
    """``W_r (K_1 (x) ... (x) K_d) W_c'``. Subclasses determine whether W selects cells or interpolates."""

    row_shape: tuple[int, ...]
    col_shape: tuple[int, ...]
    cache: TensorCache
    sum_with_diagonal: str
    """Name under which the class of its sum with a diagonal is registered."""

    @property
    @abstractmethod
    def is_symmetric(self) -> bool:
        """Whether the rows and the columns are the same."""

    @abstractmethod
    def _spread_rows(self, x: Tensor) -> Tensor:
        """``W_r' x``. shape: (*batch, N_r, C) -> (*batch, prod q_i, C)"""

    @abstractmethod
    def _spread_columns(self, x: Tensor) -> Tensor:
        """``W_c' x``. shape: (*batch, N_c, C) -> (*batch, prod m_i, C)"""

    @abstractmethod
    def _select_rows(self, grid: Tensor) -> Tensor:
        """``W_r x``. shape: (*batch, prod q_i, C) -> (*batch, N_r, C)"""

    @abstractmethod
    def _part(self, factors: Sequence[Factor], row_index: Any, col_index: Any) -> Self:
        """The operator on a subset of rows and columns, with the given factors."""

    # -- products ----------------------------------------------------------------------------------------------------

    def _work(self, rhs: Tensor, *_: Tensor) -> Work:
        """The work of a product with as many columns as `rhs` has."""
        columns = rhs.numel() // max(1, rhs.size(0 if rhs.dim() == 1 else -2))
        return columns * self.product_flops, columns * math.prod(self.col_shape)

    @property
    def sparse_flops(self) -> float:
        """FLOPs of W_r and W_c' for one column."""
        return 0.0

    @property
    def product_flops(self) -> float:
        """FLOPs of a product with one column."""
        return product_flops(self.factors) + self.sparse_flops

    @full_float32()
    @sized(_work)
    def _matmul(self, rhs: Tensor) -> Tensor:
        result = self._select_rows(kron_matmul(self._factors_for(rhs), self._spread_columns(_as_columns(rhs))))
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def shared_eigen(self) -> dict[str, KroneckerEigen]:
        """A shared dict. It holds the eigen-decomposition of the factors under "eigen" once it has been computed."""
        return self.cache.cached("eigen of", self.leaves, dict)

    @full_float32()
    @sized(_work)
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Computed on the grid. Uses narrow roots of the factors if a solve has computed them and they are cheaper."""
        others = (None,) * (len(self.representation()) - len(self.factors))
        if not any(factor.requires_grad for factor in self.factors):
            return (*(None for _ in self.factors), *others)
        left, right = self._spread_rows(_as_columns(left_vecs)), self._spread_columns(_as_columns(right_vecs))
        eigen = factored_if_cheaper(self.shared_eigen().get("eigen"))
        if eigen is not None and self.is_symmetric:
            gradients = thin_bilinear_gradient([root.to(left.dtype) for root in eigen.roots], left, right)
        else:
            gradients = kron_bilinear_gradient(self._factors_for(left), left, right)
        pairs = zip(gradients, self.leaves, strict=True)
        return (*(gradient.sum_to_size(factor.shape).to(factor.dtype) for gradient, factor in pairs), *others)

    # -- parts, multiples and sums -------------------------------------------------------------------------------------

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """A subset of rows and columns is an operator of the same class."""
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        part = self._index_batch(batch_indices)
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return part
        return self._part(part.factors, row_index, col_index)

    def _mul_constant(self, other: Any) -> Self:
        """Multiplies the first factor, so that the result is still a Kronecker product."""
        first = self.factors[0]
        if isinstance(first, CirculantOperator):
            scaled: Factor = first._mul_constant(other)
        else:
            scaled = first * (other[..., None, None] if torch.is_tensor(other) else other)
        return self.with_factors([scaled, *self.factors[1:]])

    def with_factors(self, factors: Sequence[Factor]) -> Self:
        """The same rows and columns of a Kronecker product of other factors."""
        return type(self)(*factors, **{**self._kwargs, "cache": None})

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, ZeroLinearOperator):
            return self
        if isinstance(other, DiagLinearOperator) and self.is_square and self.is_symmetric:
            return add(self.sum_with_diagonal, self, other)
        if isinstance(other, AddedDiagLinearOperator):  # add the noise last: the result then has our solves
            return self + other._linear_op + other._diag_tensor
        mixed = isinstance(other, LinearOperator)
        if mixed and self.shape[-2:] == other.shape[-2:] and self.is_square and self.is_symmetric:
            return add("kernel", self, other)
        return super().__add__(other)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        """``K_XX^-1 rhs`` without noise, by conjugate gradients. The methods of the paper need a diagonal."""
        return solve_matrix(self._as_float64()._matmul, rhs, preconditioner, num_tridiag, self.batch_shape)


def check_factors(name: str, factors: Sequence[Factor], square: bool) -> None:
    """Checks that the factors of operator `name` agree in shape, dtype, device and batch."""
    if not factors:
        raise ValueError(f"{name}: factors: got none, expected one matrix per axis")
    for axis, factor in enumerate(factors):
        if not torch.is_tensor(factor) and not (isinstance(factor, CirculantOperator) and not square):
            hint = "call .to_dense() on it" if isinstance(factor, LinearOperator) else "pass *factors, one per axis"
            raise ValueError(f"{name}: factors: axis {axis}: got {type(factor).__name__}, expected a tensor; {hint}")
        if factor.dim() < 2 or (square and factor.size(-1) != factor.size(-2)):
            wanted = "(*batch, m, m)" if square else "(*batch, q, m)"
            raise ValueError(f"{name}: factors: axis {axis}: got shape {tuple(factor.shape)}, expected {wanted}")
        if factor.dtype != factors[0].dtype:
            raise ValueError(f"{name}: factors: axis {axis} is {factor.dtype}, axis 0 is {factors[0].dtype}")
        if factor.device != factors[0].device:
            raise ValueError(f"{name}: factors: axis {axis} is on {factor.device}, axis 0 on {factors[0].device}")
    check_batches(f"{name}: factors", *(factor.shape[:-2] for factor in factors))


_checked = WeakTensorKeyDictionary()  # index -> (number of cells, version) for which it was found valid


def check_index(name: str, argument: str, index: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Checks that an index is 1-D, int64, on the device, and holds cells of a grid of this shape.

    A negative cell would silently count from the end. The range of an index tensor is checked once, and again after a
    change in place. It is not checked again when an operator is rebuilt.
    """
    if not torch.is_tensor(index) or index.dtype != torch.long or index.dim() != 1:
        came = f"{index.dtype} of shape {tuple(index.shape)}" if torch.is_tensor(index) else type(index).__name__
        hint = "; convert a mask by .flatten().nonzero().squeeze(-1)" if came.startswith("torch.bool") else ""
        raise ValueError(f"{name}: {argument}: got {came}, expected a 1-D int64 tensor of flat cells{hint}")
    if index.device != device:
        raise ValueError(f"{name}: {argument}: is on {index.device}, the factors on {device}")
    cells = math.prod(shape)
    state = None if index.is_inference() else (cells, index._version)
    if state is not None and _checked.get(index) == state:
        return
    outside = ((index < 0) | (index >= cells)).nonzero()
    if len(outside):
        entry = int(outside[0])
        raise ValueError(
            f"{name}: {argument}: entry {entry} is {int(index[entry])}, expected cells 0 to {cells - 1}; "
            "CartesianGrid.index_of gives -1 for points off the grid"
        )
    _checked[index] = state


def _as_columns(vectors: Tensor) -> Tensor:
    return vectors.unsqueeze(-1) if vectors.dim() == 1 else vectors
