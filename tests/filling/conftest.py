import pytest

from gpytorch_gaps.filling import learn


@pytest.fixture
def quick_choice(monkeypatch):
    """Candidate kernels are compared after one step: for tests that hold for any kernel."""
    monkeypatch.setattr(learn, "FIRST_STEPS", 1)
    monkeypatch.setattr(learn, "FURTHER_STEPS", 1)
