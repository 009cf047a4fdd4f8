"""A model in eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpytorch.models import ExactGP


@contextmanager
def evaluating(model: ExactGP) -> Iterator[None]:
    """Puts a model into eval mode, and every part of it back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)  # forgets what depends on the mode
        for module, mode in modes:
            module.training = mode
