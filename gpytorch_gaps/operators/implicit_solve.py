"""``A^-1 rhs`` with the implicit gradient, for an operator that owns its solve.

``x = A^-1 b``: with ``u = A^-1 g`` for an incoming gradient g, the gradient is u for b and that of ``-u' A x`` for A.
Like linear_operator's Solve, but the operator's own `_solve` decides on the method, also for small matrices. The
operator and the right-hand sides have the same batch shape: callers expand both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps import settings
from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.utils.precision import full_float32


class OwnSolve(Function):
    @staticmethod
    @full_float32()
    def forward(
        ctx: Any, representation_tree: Any, rhs: Tensor, guess: Tensor | None, of_data: bool, *matrix_args: Tensor
    ) -> Tensor:
        operator = representation_tree(*matrix_args)
        solution = operator._solve(rhs, guess=guess, of_data=of_data)
        ctx.settings = settings.in_force()
        ctx.representation_tree = representation_tree
        ctx.save_for_backward(solution, *matrix_args)
        return solution

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        solution, *matrix_args = ctx.saved_tensors
        operator = ctx.representation_tree(*matrix_args)
        with ctx.settings.restored():  # of the forward pass, wherever the backward pass is run
            left = operator._solve(grad_outputs[0])
        arg_grads: tuple[Tensor | None, ...] = (None,) * len(matrix_args)
        if any(ctx.needs_input_grad[4:]):
            # both orders, halved: A is symmetric and so must its gradient be
            arg_grads = operator._bilinear_derivative(
                torch.cat([left, solution], -1), torch.cat([solution, left], -1).mul(-0.5)
            )
        return None, left, None, None, *arg_grads


class OwnInvQuad(Function):
    """``diag(B' A^-1 B)`` in one solve.

    For ``X = A^-1 B`` and an incoming gradient g, the gradient is ``2 X g`` for B and that of ``-X' A X g`` for A.
    """

    @staticmethod
    @full_float32()
    def forward(ctx: Any, representation_tree: Any, rhs: Tensor, *matrix_args: Tensor) -> Tensor:
        operator = representation_tree(*matrix_args)
        solution = operator._solve(rhs, training=True)
        ctx.representation_tree = representation_tree
        ctx.save_for_backward(solution, *matrix_args)
        return (rhs * solution).sum(-2)

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        solution, *matrix_args = ctx.saved_tensors
        weighted = solution * grad_outputs[0].unsqueeze(-2)
        arg_grads: tuple[Tensor | None, ...] = (None,) * len(matrix_args)
        if any(ctx.needs_input_grad[2:]):
            arg_grads = ctx.representation_tree(*matrix_args)._bilinear_derivative(-weighted, solution)
        return None, 2.0 * weighted, *arg_grads
