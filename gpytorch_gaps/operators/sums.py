"""What becomes of ``a + b`` for covariances of ours: rules that are registered by the classes they make.

A Kronecker product plus a diagonal is a covariance of noisy observations, two Kronecker products are a sum of kernels.
The classes of the results are made of those of the terms, so the terms cannot import them: they look here.
"""

from collections.abc import Callable

from linear_operator.operators import LinearOperator

Rule = Callable[[LinearOperator, LinearOperator], LinearOperator]
_rules: dict[str, Rule] = {}


def register_sum(kind: str, rule: Rule) -> None:
    """Names what makes the sum of a Kronecker product with `kind`: "diagonal" or "kernel"."""
    _rules[kind] = rule


def add(kind: str, kernel: LinearOperator, other: LinearOperator) -> LinearOperator:
    return _rules[kind](kernel, other)
