"""``A^-1 rhs`` with the implicit gradient, for an operator that owns its solve.

Let ``x = A^-1 b``, and ``u = A^-1 g`` for an incoming gradient g. The gradient with respect to b is u. The gradient
with respect to A is that of ``-u' A x`` with u and x held fixed.
This is like linear_operator's Solve, but the configuration chooses the method, for small matrices too. The operator and
the right-hand sides have the same batch shape: callers expand both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.reports import also_record_to
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.utils.precision import full_float32


class ImplicitSolve(Function):
    @staticmethod
    @full_float32()
    def forward(
        ctx: Any,
        representation_tree: Any,
        rhs: Tensor,
        guess: Tensor | None,
        of_data: bool,
        config: SolveConfig,
        *matrix_args: Tensor,
    ) -> Tensor:
        operator = representation_tree(*matrix_args)
        solution = operator.solve_columns(rhs, config, guess=guess, of_data=of_data).solution
        ctx.representation_tree, ctx.config = representation_tree, config
        ctx.save_for_backward(solution, *matrix_args)
        return solution

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        solution, *matrix_args = ctx.saved_tensors
        operator = ctx.representation_tree(*matrix_args)
        with also_record_to(ctx.config.records):
            left = operator.solve_columns(grad_outputs[0], ctx.config).solution
        arg_grads: tuple[Tensor | None, ...] = (None,) * len(matrix_args)
        if any(ctx.needs_input_grad[5:]):
            # A is symmetric, so its gradient is made symmetric: the mean of both orders
            arg_grads = operator._bilinear_derivative(
                torch.cat([left, solution], -1), torch.cat([solution, left], -1).mul(-0.5)
            )
        return None, left, None, None, None, *arg_grads
