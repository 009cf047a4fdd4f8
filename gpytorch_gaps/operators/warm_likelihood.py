"""``y' A^-1 y`` and ``log|A|`` from solutions that are at hand, with their gradients.

With ``a ~ A^-1 y`` the quadratic form is taken as ``2 a'y - a'A a``, which an error of a enters squared, and whose
gradient at fixed a is ``2 a`` for y and that of ``-a' A a`` for A. The gradient of the log-determinant is that of
``mean_j u_j' A z_j`` with ``u_j ~ A^-1 z_j``; its value is followed from step to step: see `solvers.warm_start`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.utils.precision import full_float32


class WarmLikelihood(Function):
    @staticmethod
    def forward(
        ctx: Any,
        representation_tree: Any,
        rhs: Tensor,
        solution: Tensor,
        image: Tensor,
        probes: Tensor,
        probe_solutions: Tensor,
        logdet: Tensor,
        *matrix_args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """:param image: ``A a``. shape: (N, C) and (N, k) -> (C,) and ()"""
        ctx.representation_tree = representation_tree
        ctx.save_for_backward(solution, probes, probe_solutions, *matrix_args)
        return (solution * (2.0 * rhs - image)).sum(-2), logdet.clone()

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        solution, probes, probe_solutions, *matrix_args = ctx.saved_tensors
        weighted = solution * grad_outputs[0].unsqueeze(-2)
        arg_grads: tuple[Tensor | None, ...] = (None,) * len(matrix_args)
        if any(ctx.needs_input_grad[7:]):
            left = torch.cat([-weighted.mT, probe_solutions.mT * (grad_outputs[1] / probes.size(-1))]).mT
            right = torch.cat([solution.mT, probes.mT]).mT  # columns that are whole in memory
            arg_grads = ctx.representation_tree(*matrix_args)._bilinear_derivative(left, right)
        return None, 2.0 * weighted, None, None, None, None, None, *arg_grads
