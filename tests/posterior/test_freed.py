"""What a prediction leaves behind: nothing, once nobody holds it."""

import gc
import weakref

import gpytorch
import pytest

from tests.workflow._pairs import CASES


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels"])
def test_prediction_strategies_are_freed_when_gradients_flow(case, backward):
    pair, made = CASES[case](small=True), []
    model, x = pair.ours, pair.test_x
    for _ in range(4):
        model.train()
        model.eval()
        with gpytorch.settings.detach_test_caches(False):
            mean = model(x).mean
            if backward:
                mean.sum().backward()
        made.append(weakref.ref(model.prediction_strategy))
        del mean
    assert made[-1]() is model.prediction_strategy
    model.train()
    gc.collect()
    assert sum(strategy() is not None for strategy in made) == 0
