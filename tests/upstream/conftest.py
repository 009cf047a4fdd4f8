"""Canaries are deterministic; the warnings that traps raise on their way are theirs, not ours."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.default_generator.manual_seed(0)  # of the CPU alone: other tests may have registered a stand-in device
    yield
    torch.set_rng_state(state)
    torch.set_default_dtype(dtype)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for kind in ("linear_operator.utils.warnings.NumericalWarning", "gpytorch.utils.warnings.GPInputWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
