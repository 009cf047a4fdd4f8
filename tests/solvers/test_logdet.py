"""``log|W K W' + D|``: exact from both sides, stochastic with honest standard errors, and all gradients.

Stochastic estimates are judged twice: one run within four of its reported standard errors, and forty runs whose
z-scores ``(estimate - truth) / reported`` must scatter about 0 with a standard deviation between 0.6 and 1.5.
"""

import math

import linear_operator
import pytest
import torch

from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.operators import FillGapsOperator
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.logdet.whole_grid import gap_side_logdet
from gpytorch_gaps.solvers.planning import logdet as planning
from tests import _dense as dense
from tests._covering import covering
from tests._dense import data_side_logdet

EXACT = 1e-8
REPEATS = 40


def number(value):
    return torch.tensor([value], dtype=torch.float64)


def axes(shape, batch=()):
    generator = torch.Generator().manual_seed(0)
    return tuple(0.1 + torch.rand(*batch, size, generator=generator, dtype=torch.float64) for size in shape)


def value_and_gradients(function, factors, noise, weights=None):
    factors, noise, inputs = dense.with_leaves(factors, noise)
    value = function(factors, noise)
    scalar = value.sum() if weights is None else (weights * value).sum()
    return value.detach(), dense.gradients(scalar, inputs, len(factors))


def check(function, factors, index, noise, tolerance=EXACT):
    value, gradients = value_and_gradients(function, factors, noise)
    truth, expected = value_and_gradients(lambda f, s: torch.logdet(dense.system(f, index, s)), factors, noise)
    assert value.shape == truth.shape
    assert dense.relative(value, truth) < tolerance
    for i, (got, want) in enumerate(zip(gradients, expected, strict=True)):
        assert bool(torch.isfinite(got).all()), i
        assert dense.relative(got, want) < tolerance, i


FACTORS = {
    "rough": [dense.matern32(7), dense.random_psd(6)],
    "identities": [dense.identity(7), dense.identity(6)],
    "one identity": [3.0 * dense.identity(7), dense.matern32(6)],
    "periodic": [dense.periodic(8), dense.periodic(6)],
    "three axes": [dense.identity(4), dense.periodic(5), dense.ard(3)],
    # a smooth factor has eigenvalues of zero that rounding makes negative; their derivative is as large as any
    "smooth": [dense.se(14, 1.0), dense.se(12, 1.0)],
    "one axis": [dense.matern32(20)],
}


def shape_of(factors):
    return tuple(factor.size(-1) for factor in factors)


# -- exact -----------------------------------------------------------------------------------------------------------


@covering(factors=FACTORS, pattern=["random", "block", "slice", "one gap", "none"], noise=[1e-2, 10.0])
def test_exact_from_the_gaps(factors, pattern, noise):
    factors = FACTORS[factors]
    if pattern == "slice" and len(factors) == 1:
        pattern = "random"
    index = dense.observed(pattern, shape_of(factors), 0.3)
    check(
        lambda f, s: gap_side_logdet(GapSystem(f, index, s), f, s),
        factors,
        index,
        number(noise),
    )


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS.keys())
@pytest.mark.parametrize("pattern", ["random", "block", "one observation"])
def test_exact_from_the_data(factors, pattern):
    index = dense.observed(pattern, shape_of(factors), 0.6)
    check(lambda f, s: data_side_logdet(f, index, s), factors, index, number(1e-2))


@pytest.mark.parametrize("fraction", [0.3, 0.7])
@pytest.mark.parametrize("kind", ["constant", "product", "per point", "duplicates"])
def test_exact_through_the_operator(kind, fraction):
    factors = FACTORS["rough"]
    index = dense.observed("random", (7, 6), fraction)
    noise = number(0.05)
    if kind == "product":
        noise = axes((7, 6))
    elif kind == "per point":
        noise = 0.1 + dense.randn(len(index)).abs()
    elif kind == "duplicates":
        index = torch.cat([index, index[:3]])
    with settings.logdet_method("exact"), record_solves() as solves:
        check(lambda f, s: dense.build(f, index, s).logdet(), factors, index, noise)
    (report,) = solves.logdets
    assert report.method == "exact"
    assert float(report.standard_error) == 0.0
    if kind in ("per point", "duplicates") or fraction > 0.5:
        assert report.reason == "data side"
    truth = torch.logdet(dense.system(factors, index, noise))
    assert dense.relative(report.value, truth) < EXACT


@pytest.mark.parametrize("kind", ["constant", "product"])
def test_exact_takes_the_side_of_few_gaps(kind):
    """Nine hundred observations and sixty gaps, Cholesky allowed for the gaps only."""
    shape = (32, 30)
    factors = [dense.matern32(32), dense.matern32(30)]
    index = dense.observed("random", shape, 0.0625)
    with linear_operator.settings.max_cholesky_size(100), record_solves() as solves:
        check(
            lambda f, s: dense.build(f, index, s).logdet(),
            factors,
            index,
            number(0.05) if kind == "constant" else axes(shape),
        )
    assert [(report.method, report.reason) for report in solves.logdets] == [("exact", "gaps side")]


@pytest.mark.parametrize("kind", ["constant", "product", "per point"])
@pytest.mark.parametrize("factor_batch", [(), (3,)], ids=["factors shared", "factors batched"])
@pytest.mark.parametrize("fraction", [0.3, 0.7])
def test_exact_logdets_of_batches(kind, factor_batch, fraction):
    factors = [dense.random_psd(5, 1, batch=factor_batch), dense.random_psd(4, 2)]
    index = dense.observed("random", (5, 4), fraction)
    noise = torch.tensor([[1e-2], [1.0], [1e2]], dtype=torch.float64)
    if kind == "product":
        noise = axes((5, 4), batch=(3,))
    elif kind == "per point":
        noise = 0.1 + dense.randn(3, len(index)).abs()
    with settings.logdet_method("exact"):
        check(lambda f, s: dense.build(f, index, s).logdet(), factors, index, noise)


def test_exact_at_small_noise():
    """s2 = 1e-6 under a smooth kernel: log|A| and log|V A^-1 V'| are hundreds, of opposite sign."""
    factors, noise = [dense.se(10, 0.5), dense.se(9, 0.5)], number(1e-6)
    index = dense.observed("random", (10, 9), 0.3)
    # the matrix has a condition number of 1e8: so many digits of 1e-16 are lost in its gradient, dense or not
    with settings.logdet_method("exact"):
        check(lambda f, s: dense.build(f, index, s).logdet(), factors, index, noise, tolerance=1e-7)


@pytest.mark.parametrize("fraction", [0.2, 0.8])
def test_auto_is_exact_where_either_side_is_small(fraction):
    factors, noise = FACTORS["rough"], number(0.1)
    index = dense.observed("random", (7, 6), fraction)
    smaller = min(len(index), 42 - len(index))
    for limit, method in ((smaller, "exact"), (0, "stochastic")):
        with linear_operator.settings.max_cholesky_size(limit), record_solves() as solves:
            value = dense.build(factors, index, noise).logdet()
        assert solves.logdets[-1].method == method
        if method == "exact":
            assert dense.relative(value, torch.logdet(dense.system(factors, index, noise))) < EXACT


def test_auto_is_exact_beyond_the_limit_where_that_costs_less_than_an_estimate():
    index = dense.observed("random", (7, 6), 0.5)
    with linear_operator.settings.max_cholesky_size(len(index) // 2), record_solves() as solves:
        dense.build(FACTORS["rough"], index, number(0.1)).logdet()
    assert solves.logdets[-1].method == "exact"


@pytest.mark.parametrize("side", ["gaps", "data"])
def test_exact_differentiates_twice_or_refuses(side):
    """A second derivative is right, or an error: never a wrong number."""
    index, factors = dense.observed("random", (7, 6), 0.3), FACTORS["rough"]

    def second(function):
        noise = number(0.1).requires_grad_(True)
        (first,) = torch.autograd.grad(function(noise), noise, create_graph=True)
        return float(torch.autograd.grad(first, noise)[0])

    def ours(noise):
        if side == "gaps":
            return gap_side_logdet(GapSystem(factors, index, noise), factors, noise)
        return data_side_logdet(factors, index, noise)

    expected = second(lambda noise: torch.logdet(dense.system(factors, index, noise)))
    try:
        got = second(ours)
    except RuntimeError:
        return
    assert got == pytest.approx(expected, rel=1e-6)


def test_float32_is_accurate_to_its_inputs():
    """Against float64 algebra on the same rounded factors: 1e-5 relative for the value, 1e-4 for gradients."""
    single = [factor.float() for factor in FACTORS["rough"]]
    double = [factor.double() for factor in single]
    for fraction in (0.3, 0.7):
        index = dense.observed("random", (7, 6), fraction)
        with settings.logdet_method("exact"):
            value, gradients = value_and_gradients(
                lambda f, s, i=index: dense.build(f, i, s).logdet(), single, number(0.05).float()
            )
        assert value.dtype == torch.float32
        truth, expected = value_and_gradients(
            lambda f, s, i=index: torch.logdet(dense.system(f, i, s)), double, number(0.05).float().double()
        )
        assert dense.relative(value, truth) < 1e-5
        for got, want in zip(gradients, expected, strict=True):
            assert dense.relative(got, want) < 1e-4


@pytest.mark.parametrize("method", ["exact", "stochastic"])
def test_float32_smooth_kernels_are_finite_wherever_the_matrix_is_positive(method):
    """Rounding makes eigenvalues of a smooth float32 K as negative as 1e-5; noise above that keeps all well defined."""
    single = [dense.se(30, 1.0).float(), dense.se(25, 1.0).float()]
    double, noise = [factor.double() for factor in single], torch.tensor([1e-3])
    index = dense.observed("random", (30, 25), 0.2)
    matrix = dense.system(double, index, noise.double())
    assert float(torch.linalg.eigvalsh(matrix).min()) > 0.0
    torch.manual_seed(0)
    with (
        settings.logdet_method(method),
        linear_operator.settings.max_cholesky_size(0),
        linear_operator.settings.num_trace_samples(20),
    ):
        value, gradients = value_and_gradients(lambda f, s: dense.build(f, index, s).logdet(), single, noise)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert dense.relative(value, torch.logdet(matrix)) < 1e-2


def test_nystrom_counts_cells_observed_twice():
    """``sum_{i <= N}`` goes on past the M eigenvalues there are, with zeros, where N > M."""
    factors, noise = [dense.random_psd(3, 1), dense.random_psd(2, 2)], number(0.1)
    index = torch.tensor([0, 1, 2, 3, 4, 5, 0, 3])
    values = torch.cat([torch.linalg.eigvalsh(dense.kron(factors)).flip(0), torch.zeros(2, dtype=torch.float64)])
    with settings.logdet_method("nystrom"):
        value = dense.build(factors, index, noise).logdet()
    assert dense.relative(value, (8 / 6 * values + noise).log().sum()) < EXACT


# -- stochastic ------------------------------------------------------------------------------------------------------

SHAPE = (9, 8)


def estimate(factors, index, noise, probes, rank):
    """One estimate and its report, Cholesky forbidden, to a train tolerance that costs no accuracy.

    :param rank: of the preconditioner on the side of the data. None: on that of the gaps, whatever its variance.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(rank),
        settings.train_tolerance(1e-8),
        linear_operator.settings.max_cholesky_size(0),
        linear_operator.settings.num_trace_samples(probes),
        record_solves() as solves,
    ):
        if rank is None:
            patch.setattr(planning, "_NEGLIGIBLE_ERROR", math.inf)
        value = dense.build(factors, index, noise).logdet()
    return value, solves.logdets[-1]


ROUGH = [dense.matern32(9, 0.2), dense.matern32(8, 0.2)]
STOCHASTIC = {
    # id: factors, noise, rank, the side it must work on
    "data, plain": (ROUGH, number(0.1), 0, "data side"),
    "data, rank 15": (ROUGH, number(0.02), 15, "data side"),
    "gaps": (ROUGH, number(0.02), None, "gaps side"),
    "data, product noise": (ROUGH, axes(SHAPE), 15, "data side"),
    "gaps, product noise": (ROUGH, tuple(0.4 * axis for axis in axes(SHAPE)), None, "gaps side"),
    "data, noise per point": (ROUGH, 0.02 + 0.2 * dense.randn(43).abs(), 15, "data side"),
}


@pytest.mark.parametrize(("factors", "noise", "rank", "side"), STOCHASTIC.values(), ids=STOCHASTIC.keys())
def test_stochastic_is_unbiased_with_an_honest_standard_error(factors, noise, rank, side):
    index = dense.observed("random", SHAPE)
    truth = torch.logdet(dense.system(factors, index, noise))
    errors, scores = [], []
    for seed in range(REPEATS):
        torch.manual_seed(seed)
        value, report = estimate(factors, index, noise, 30, rank)
        assert (report.method, report.reason, report.num_probes) == ("stochastic", side, 30)
        errors.append(float(value - truth))
        scores.append(errors[-1] / float(report.standard_error))
    errors, scores = torch.tensor(errors), torch.tensor(scores)
    assert 0.6 < float(scores.std()) < 1.5
    assert abs(float(scores.mean())) < 4.0 / REPEATS**0.5
    assert abs(float(errors.mean())) < 4.0 * float(errors.std()) / REPEATS**0.5
    assert float(errors.std()) > 1e-6  # it is an estimate


@pytest.mark.parametrize("case", ["data, rank 15", "gaps", "data, product noise"])
def test_deterministic_probes_give_one_value_with_an_honest_standard_error(case):
    factors, noise, rank, _ = STOCHASTIC[case]
    index = dense.observed("random", SHAPE)
    truth, scores = torch.logdet(dense.system(factors, index, noise)), []
    for seed in range(12):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with linear_operator.settings.deterministic_probes(True):
            (value, report), (again, _) = (estimate(factors, index, noise, 30, rank) for _ in range(2))
        assert torch.equal(value, again)
        assert torch.equal(torch.get_rng_state(), state)
        scores.append(float((value - truth) / report.standard_error))
    scores = torch.tensor(scores)
    assert abs(float(scores.mean())) < 4.0 / len(scores) ** 0.5
    assert 0.4 < float(scores.std()) < 1.7


@pytest.mark.parametrize(("factors", "noise", "rank", "side"), STOCHASTIC.values(), ids=STOCHASTIC.keys())
def test_stochastic_report_is_the_value_returned(factors, noise, rank, side):
    index = dense.observed("random", SHAPE)
    value, report = estimate(factors, index, noise, 5, rank)
    assert float(report.value) == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize(("factors", "noise", "rank", "side"), STOCHASTIC.values(), ids=STOCHASTIC.keys())
def test_stochastic_gradient_is_unbiased(factors, noise, rank, side):
    """The mean of forty gradients lies within four empirical standard errors of the dense one.

    Entry by entry for the noise; in twelve fixed random directions for each factor, symmetrised (a probe's gradient
    ``A^-1 z z' P^-1`` is not symmetric, its mean is).
    """
    index = dense.observed("random", SHAPE)
    _, expected = value_and_gradients(lambda f, s: torch.logdet(dense.system(f, index, s)), factors, noise)
    runs = []
    for seed in range(REPEATS):
        torch.manual_seed(1000 + seed)
        _, gradients = value_and_gradients(lambda f, s: estimate(f, index, s, 15, rank)[0], factors, noise)
        runs.append(gradients)
    for i, want in enumerate(expected):
        samples = torch.stack([run[i] for run in runs]).flatten(1)
        want = want.flatten()
        if want.numel() > 12:
            directions = dense.randn(want.numel(), 12, seed=5)
            samples, want = samples @ directions, want @ directions
        error = (samples.mean(0) - want).abs()
        bound = 4.0 * samples.std(0) / REPEATS**0.5
        assert bool((error <= bound).all()), (i, error / bound)
        assert float(bound.max()) < 0.5 * float(want.norm())  # the bound says something


@pytest.mark.parametrize("rank", [None, 6], ids=["gaps", "data"])
@pytest.mark.parametrize("factor_batch", [(), (3,)], ids=["factors shared", "factors batched"])
@pytest.mark.parametrize("noise_batch", [(), (3,)], ids=["noise shared", "noise batched"])
def test_stochastic_logdets_of_batches(factor_batch, noise_batch, rank):
    """A standard error for every element of the batch, each honest, whichever arguments carry the batch."""
    factors = [dense.matern32(7, 0.2) * torch.ones(*factor_batch, 1, 1), dense.random_psd(6, 2)]
    noise = (0.05 + dense.randn(*noise_batch, 1).abs()) * torch.ones(*noise_batch, 1)
    index = dense.observed("random", (7, 6))
    truth = torch.logdet(dense.system(factors, index, noise))
    torch.manual_seed(0)
    value, report = estimate(factors, index, noise, 300, rank)
    assert value.shape == truth.shape == report.standard_error.shape
    assert bool(((value - truth).abs() < 4.0 * report.standard_error).all())
    assert bool((report.standard_error > 0).all())
    _, expected = value_and_gradients(lambda f, s: torch.logdet(dense.system(f, index, s)), factors, noise)
    _, gradients = value_and_gradients(lambda f, s: estimate(f, index, s, 300, rank)[0], factors, noise)
    for got, want in zip(gradients, expected, strict=True):
        assert dense.relative(got, want) < 0.2


@pytest.mark.parametrize("rank", [None, 6], ids=["gaps", "data"])
def test_stochastic_takes_batched_right_hand_sides(rank):
    """The quadratic form broadcasts as it does with an exact log-determinant."""
    factors, noise = [dense.matern32(7, 0.2), dense.random_psd(6, 2)], number(0.1)
    index = dense.observed("random", (7, 6))
    rhs = dense.randn(3, len(index), 2)
    matrix = dense.system(factors, index, noise)
    with (
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(rank),
        settings.train_tolerance(1e-12),
        linear_operator.settings.max_cholesky_size(0),
    ):
        quad, _ = dense.build(factors, index, noise).inv_quad_logdet(rhs, logdet=True)
    assert dense.relative(quad, (rhs * torch.linalg.solve(matrix, rhs)).sum((-2, -1))) < EXACT


def test_stochastic_batch_of_easy_and_hard():
    """An element that converges in two iterations goes on beside one that needs hundreds; neither estimate suffers."""
    factors, index = [dense.matern32(9), dense.se(8)], dense.observed("random", SHAPE)
    noise = torch.tensor([[1e-4], [1e4]], dtype=torch.float64)
    truth = torch.logdet(dense.system(factors, index, noise))
    torch.manual_seed(0)
    for rank in (0, None):
        value, report = estimate([f.expand(2, -1, -1) for f in factors], index, noise, 100, rank)
        assert bool(((value - truth).abs() < 4.0 * report.standard_error + 1e-10 * truth.abs()).all())


@pytest.mark.parametrize("rank", [None, 0, 5], ids=["gaps", "data, plain", "data, rank 5"])
def test_stochastic_repeated_eigenvalues(rank):
    """Identity factors: the estimate is exact (every probe sees one eigenvalue), its gradient finite and right."""
    factors, noise = [dense.identity(6), 2.0 * dense.identity(5)], number(0.3)
    index = dense.observed("random", (6, 5))
    truth, expected = value_and_gradients(lambda f, s: torch.logdet(dense.system(f, index, s)), factors, noise)
    torch.manual_seed(0)
    value, gradients = value_and_gradients(lambda f, s: estimate(f, index, s, 2000, rank)[0], factors, noise)
    assert dense.relative(value, truth) < (0.05 if rank == 5 else 1e-9)
    for got, want in zip(gradients, expected, strict=True):
        assert bool(torch.isfinite(got).all())
        assert dense.relative(got, want) < 0.05


def test_stochastic_without_gaps_is_exact():
    factors, noise = FACTORS["rough"], number(0.1)
    value, report = estimate(factors, torch.arange(42), noise, 5, None)
    assert dense.relative(value, torch.logdet(dense.system(factors, torch.arange(42), noise))) < EXACT
    assert float(report.standard_error) == 0.0


def test_one_probe_has_no_standard_error():
    index = dense.observed("random", SHAPE)
    for rank in (None, 15):
        _, report = estimate(ROUGH, index, number(0.02), 1, rank)
        assert float(report.standard_error) == torch.inf


@pytest.mark.parametrize("rank", [0, 20])
def test_fill_gaps_matrix_alone(rank):
    """``log|V A^-1 V'|`` preconditioned by eqn:FG_precon is as unbiased as without."""
    index, noise = dense.observed("random", SHAPE), number(0.02)
    gaps = dense.gaps_of(index, SHAPE)
    kernel = dense.kron(ROUGH) + noise * torch.eye(72, dtype=torch.float64)
    truth = torch.logdet(dense.select(kernel.inverse(), gaps))
    values = []
    for seed in range(REPEATS):
        torch.manual_seed(seed)
        with (
            settings.preconditioner_rank(rank),
            settings.train_tolerance(1e-8),
            settings.solve_tolerance(1e-8),
            linear_operator.settings.max_cholesky_size(0),
            linear_operator.settings.num_trace_samples(20),
        ):
            values.append(float(FillGapsOperator(*ROUGH, noise=noise, gap_index=gaps).logdet() - truth))
    values = torch.tensor(values)
    assert abs(float(values.mean())) < 4.0 * float(values.std()) / REPEATS**0.5
