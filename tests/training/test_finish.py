"""The quasi-Newton steps that end a fit, on functions whose optimum and curvature are known."""

import copy

import pytest
import torch
from gpytorch.constraints import GreaterThan

from gpytorch_gaps.training.finish import QuasiNewton

CURVATURE = torch.tensor([[1.2, 0.3, 0.1], [0.3, 0.4, -0.1], [0.1, -0.1, 0.2]], dtype=torch.float64)
OPTIMUM = torch.tensor([0.4, -0.3, 0.8], dtype=torch.float64)


def loss_at(parameters):
    off = torch.cat([parameter.reshape(-1) for parameter in parameters]) - OPTIMUM
    return 0.5 * off @ CURVATURE @ off


def start():
    return [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(1, 1).double())]


def run(parameters, optimizer, steps):
    losses, gains = [], []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = loss_at(parameters)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        gains.append(optimizer.expected_gain)
    return losses, gains


def test_a_quadratic_function_is_minimized_in_a_few_evaluations():
    parameters = start()
    losses, _ = run(parameters, QuasiNewton(parameters), 25)
    assert losses[-1] < 1e-12 < losses[0]


def test_the_expected_gain_is_the_gain_once_the_curvature_is_known():
    parameters = start()
    optimizer = QuasiNewton(parameters)
    run(parameters, optimizer, 1)
    assert not optimizer.knows_curvature
    losses, gains = run(parameters, optimizer, 12)
    assert optimizer.knows_curvature
    known = [(loss, gain) for loss, gain in zip(losses[4:], gains[4:], strict=True) if loss > 1e-14]
    assert known
    for loss, gain in known:
        assert gain == pytest.approx(loss, rel=0.01)


def test_no_parameter_moves_far_in_one_step():
    parameters = [torch.nn.Parameter(torch.full((2,), 1e3).double()), torch.nn.Parameter(torch.zeros(1, 1).double())]
    before = [parameter.detach().clone() for parameter in parameters]
    run(parameters, QuasiNewton(parameters), 1)
    assert max((a - b).abs().max().item() for a, b in zip(parameters, before, strict=True)) <= 0.5


def test_directions_that_curve_downwards_are_not_learned_from():
    parameter = torch.nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    optimizer = QuasiNewton([parameter])
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = parameter.cos().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert not optimizer.knows_curvature
    assert parameter.item() > 0.1  # downhill all the same


def test_a_copy_of_its_state_goes_on_bit_for_bit():
    parameters = start()
    optimizer = QuasiNewton(parameters)
    run(parameters, optimizer, 6)
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = QuasiNewton(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert run(others, other, 4) == run(parameters, optimizer, 4)


def test_parameters_without_a_gradient_stay():
    used, unused = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    optimizer = QuasiNewton([used, unused])
    run([used], optimizer, 20)
    assert loss_at([used]).item() == pytest.approx(0.0, abs=1e-10)
    assert torch.equal(unused.detach(), torch.zeros(3, dtype=torch.float64))


def constrained(bound, start):
    """A parameter whose value has a lower bound, raw, with its constraint."""
    constraint = GreaterThan(bound)
    raw = torch.nn.Parameter(constraint.inverse_transform(torch.tensor([start], dtype=torch.float64)))
    return raw, constraint.double()


def run_bounded(bound, start, couple=0.0, steps=40):
    """Minimizes a function of a bounded value v and a free x whose optimum is v = 0.5, x = 1 + couple (v - 0.5)."""
    raw, constraint = constrained(bound, start)
    free = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = QuasiNewton([raw, free], {raw: constraint})
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            value = constraint.transform(raw)
            loss = (0.2 * (value - 0.5).square() + 0.4 * (free - 1.0 - couple * (value - 0.5)).square()).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return constraint.transform(raw).item(), free.item(), optimizer


def test_a_parameter_whose_optimum_is_below_its_bound_is_held_there():
    value, free, optimizer = run_bounded(0.8, 1.0)
    assert value == pytest.approx(0.8, rel=1e-5)
    assert free == pytest.approx(1.0, abs=1e-6)
    assert optimizer.expected_gain < 1e-10
    assert optimizer.knows_curvature


def test_a_parameter_that_has_its_optimum_above_its_bound_after_all_is_released():
    """At first, the free parameter pulls it down to its bound."""
    value, free, _ = run_bounded(0.45, 0.46, couple=6.0, steps=80)
    assert value == pytest.approx(0.5, abs=1e-4)
    assert free == pytest.approx(1.0, abs=1e-3)
