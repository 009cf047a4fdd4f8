"""``(K + s2 I)^-1 x`` on the whole grid, with the implicit gradient.

The forward pass uses the eigen-decomposition. The backward pass does not differentiate it. Let ``v = A^-1 x``, and
``u = A^-1 g`` for an incoming gradient g. The gradient with respect to x is u, and with respect to s2 ``-sum u v``. The
gradient with respect to the factors is that of ``-u' K v`` with u and v held fixed.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient
from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.linalg.eigen import KroneckerEigen
from gpytorch_gaps.linalg.products import product_flops
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import Work, sized


def _work(eigen: KroneckerEigen, noise: Tensor, x: Tensor) -> Work:
    return product_flops(eigen.vectors, x.numel() // max(1, x.size(-2))), x.numel()


@sized(_work)
def _shifted_solve(eigen: KroneckerEigen, noise: Tensor, x: Tensor) -> Tensor:
    return eigen.to(x.dtype).shifted_solve(noise, x)


class ShiftedSolve(Function):
    @staticmethod
    @full_float32()
    def forward(ctx: Any, eigen: KroneckerEigen, noise: Tensor, x: Tensor, *factors: Tensor) -> Tensor:
        solution = _shifted_solve(eigen, noise, x)
        ctx.eigen = eigen
        ctx.x_shape = x.shape
        ctx.save_for_backward(noise, solution, *factors)
        return solution

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        noise, solution, *factors = ctx.saved_tensors
        left = _shifted_solve(ctx.eigen, noise, grad_outputs[0])
        factor_grads: list[Tensor | None] = [None] * len(factors)
        if any(ctx.needs_input_grad[3:]):
            factor_grads = [-grad for grad in kron_bilinear_gradient(factors, left, solution)]
        noise_grad = None
        if ctx.needs_input_grad[1]:
            noise_grad = -(left * solution).sum((-2, -1)).unsqueeze(-1).sum_to_size(noise.shape)
        return None, noise_grad, left.sum_to_size(ctx.x_shape), *factor_grads
