"""First derivatives are exact; second ones are not implemented, and refused rather than answered wrongly."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def refuse_second_order() -> None:
    """To be called inside a backward pass, where gradients are enabled only by ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: second derivatives of solves, log-determinants and eigenvalues are not implemented; "
            "expected first derivatives only"
        )


class FirstOrderOnly(Function):
    """The identity, with a backward pass that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        refuse_second_order()
        return grad_outputs[0]
