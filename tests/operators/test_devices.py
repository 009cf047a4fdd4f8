"""Every operator, solve, log-determinant and preconditioner where its tensors live, against dense algebra on the CPU.

On the CPU, on the accelerator where there is one, and on the stand-in device of ``tests/_standin.py``, which raises
when devices are mixed and counts copies and waits. What is asserted of these counts was measured: products make none;
the package itself copies nothing between host and device, also where linear_operator does; and conjugate gradients wait
once every ten iterations.
"""

import warnings

import gpytorch
import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.operators import (
    FillGapsOperator,
    PenalizedGapsOperator,
    SelectedKroneckerDiagOperator,
    SelectedKroneckerOperator,
)
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner
from tests import _dense as dense
from tests import _standin as standin
from tests._devices import CPU, devices, on_standin
from tests._standin import count_transfers

EXACT = 1e-8


@pytest.fixture(autouse=True)
def _accurate():
    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        yield


SHAPE = (5, 4, 3)
FACTORS = [dense.matern32(5), dense.random_psd(4), dense.se(3)]
INDEX = dense.observed("random", SHAPE)
GAPS = dense.gaps_of(INDEX, SHAPE)
PENALTY = 100.0
AXES = [torch.linspace(0, 1, 6, dtype=torch.float64), dense.randn(5, 2), torch.arange(4).double()]


def _noise(kind, batch=()):
    generator = torch.Generator().manual_seed(0)
    if kind == "constant":
        return torch.full((*batch, 1), 0.05, dtype=torch.float64)
    if kind == "per point":
        return 0.1 + torch.rand(*batch, len(INDEX), generator=generator, dtype=torch.float64)
    return tuple(0.2 + torch.rand(*batch, size, generator=generator, dtype=torch.float64) for size in SHAPE)


NOISES = ("constant", "per point", "per axis")


def move(value, device):
    """Tensors, and tuples or lists of them."""
    return value.to(device) if torch.is_tensor(value) else type(value)(move(part, device) for part in value)


def check(got, expected, device, tolerance=EXACT):
    """On its device, and equal to what the CPU has."""
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.device == device, i
        assert ours.shape == theirs.shape, i
        error = dense.relative(ours.detach().cpu(), theirs.detach())
        assert error <= tolerance, f"{i}: relative error {error:.1e}"


def with_gradients(value, weights, inputs, num_factors):
    """The value, and the gradients of a weighted sum of it."""
    return [value.detach(), *dense.gradients((weights * value).sum(), inputs, num_factors)]


# -- products --------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([7, 3, 3, 0])


def _fill(factors, noise):
    matrix = dense.kron(factors)
    return dense.select(torch.linalg.inv(matrix + noise * torch.eye(len(matrix), dtype=matrix.dtype)), GAPS)


def _penalized(factors, noise):
    matrix = dense.kron(factors)
    return matrix + torch.diag_embed(noise + torch.zeros(len(matrix), dtype=matrix.dtype).index_fill(0, GAPS, PENALTY))


# name -> kind of noise; the operator from factors, noise and a way to move indices; the matrix from factors and noise
OPERATORS = {
    "SelectedKronecker": (
        "constant",
        lambda f, n, to: SelectedKroneckerOperator(*f, row_index=to(INDEX)),
        lambda f, n: dense.select(dense.kron(f), INDEX),
    ),
    "SelectedKronecker, all cells": (
        "constant",
        lambda f, n, to: SelectedKroneckerOperator(*f),
        lambda f, n: dense.kron(f),
    ),
    "SelectedKronecker, rectangular": (
        "constant",
        lambda f, n, to: SelectedKroneckerOperator(*f, row_index=to(ROWS), col_index=to(INDEX)),
        lambda f, n: dense.select(dense.kron(f), ROWS, INDEX),
    ),
    **{
        f"SelectedKroneckerAddedDiag, {kind}": (
            kind,
            lambda f, n, to: dense.build(f, to(INDEX), n),
            lambda f, n: dense.system(f, INDEX, n),
        )
        for kind in NOISES
    },
    "SelectedKroneckerDiag": (
        "per axis",
        lambda f, n, to: SelectedKroneckerDiagOperator(*n, index=to(INDEX)),
        lambda f, n: torch.diag_embed(dense.diagonal(n, INDEX)),
    ),
    "FillGaps": ("constant", lambda f, n, to: FillGapsOperator(*f, noise=n, gap_index=to(GAPS)), _fill),
    "PenalizedGaps": (
        "constant",
        lambda f, n, to: PenalizedGapsOperator(*f, noise=n, gap_index=to(GAPS), penalty=PENALTY),
        _penalized,
    ),
}


def make(name, device):
    """The operator on a device, the matrix on the CPU, and the inputs of each that collect gradients."""
    kind, build, matrix = OPERATORS[name]
    factors, noise, inputs = dense.with_leaves(move(FACTORS, device), move(_noise(kind), device))
    own_factors, own_noise, own_inputs = dense.with_leaves(FACTORS, _noise(kind))
    operator, expected = build(factors, noise, lambda index: index.to(device)), matrix(own_factors, own_noise)
    used = [
        own is not None for own in torch.autograd.grad(expected.sum(), own_inputs, retain_graph=True, allow_unused=True)
    ]
    pick = [i for i, is_used in enumerate(used) if is_used]
    num_factors = sum(i < len(FACTORS) for i in pick)
    return operator, expected, [inputs[i] for i in pick], [own_inputs[i] for i in pick], num_factors


@devices
@pytest.mark.parametrize("name", OPERATORS)
def test_products_stay_on_their_device(name, device):
    operator, matrix, inputs, own_inputs, num_factors = make(name, device)
    x, weights = dense.randn(matrix.size(-1), 3), dense.randn(matrix.size(-2), 3, seed=1)
    value = operator @ x.to(device)
    got = with_gradients(value, weights.to(device), inputs, num_factors)
    check(got, with_gradients(matrix @ x, weights, own_inputs, num_factors), device)
    check([operator.mT @ weights.to(device), operator.to_dense()], [matrix.mT @ weights, matrix], device)
    if matrix.size(-1) == matrix.size(-2):
        check([operator.diagonal()], [matrix.diagonal()], device)


@on_standin
@pytest.mark.parametrize("name", OPERATORS)
def test_products_neither_copy_nor_wait(name):
    operator, matrix, inputs, _, _ = make(name, standin.DEVICE)
    x = standin.to_standin(dense.randn(matrix.size(-1), 3))
    operator @ x  # fill-gaps decomposes its factors at the first
    with count_transfers() as counts:
        value = operator @ x
    assert counts.events == []
    with count_transfers() as counts:
        torch.autograd.grad(value.sum(), inputs)
    assert counts.copies == 0
    # linear_operator rebuilds the operator from detached indices, whose range is looked at once more
    assert {event.op for event in counts.events} <= {"nonzero"}


@devices
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_move_to_another_device(name, device):
    kind, build, matrix = OPERATORS[name]
    operator = build(FACTORS, _noise(kind), lambda index: index).to(device)
    assert operator.device == device
    expected = matrix(FACTORS, _noise(kind))
    x = dense.randn(expected.size(-1), 1)
    check([operator @ x.to(device)], [expected @ x], device)


# -- solves ----------------------------------------------------------------------------------------------------------

METHODS = [
    (kind, method, rank)
    for kind in NOISES
    for method, rank in (
        ("auto", None),
        ("fill", None),
        ("fill", 5),
        ("ignore", 0),
        ("ignore", 20),
        ("penalize", None),
        ("spectral", None),
        ("cholesky", None),
    )
    if kind != "per point" or method not in ("fill", "penalize", "spectral")
]


@devices
@pytest.mark.parametrize(
    ("kind", "method", "rank", "max_cholesky"), [(*method, 800 * (i % 2)) for i, method in enumerate(METHODS)]
)
def test_solves_stay_on_their_device(kind, method, rank, max_cholesky, device):
    operator, matrix, inputs, own_inputs, num_factors = make(f"SelectedKroneckerAddedDiag, {kind}", device)
    rhs, weights = dense.randn(len(INDEX), 2), dense.randn(len(INDEX), 2, seed=1)
    with (
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        linear_operator.settings.max_cholesky_size(max_cholesky),
        record_solves() as solves,
        count_transfers() as counts,
    ):
        ours = rhs.to(device).requires_grad_(True)
        moved = counts.copies
        got = with_gradients(operator.solve(ours), weights.to(device), [*inputs, ours], num_factors)
    assert counts.within(gaps).copies == 0, counts.by_line
    assert moved == (device == standin.DEVICE)
    assert {report.residual.device for report in solves} == {device}
    if method != "auto":
        assert {(report.method, report.rank) for report in solves} == {(method, rank or 0)}
    theirs = rhs.clone().requires_grad_(True)
    solution = torch.linalg.solve(matrix, theirs)
    check(got, with_gradients(solution, weights, [*own_inputs, theirs], num_factors), device)


@devices
@pytest.mark.parametrize("method", ["auto", "fill", "ignore"])
def test_solves_in_float32(method, device):
    """Refinement and preconditioners are float64, on the same device."""
    operator, matrix, *_ = make("SelectedKroneckerAddedDiag, constant", CPU)
    rhs = dense.randn(len(INDEX), 2)
    with (
        settings.gap_method(method),
        settings.solve_tolerance(1e-6),
        linear_operator.settings.max_cholesky_size(0),
    ):
        solution = operator.to(device, torch.float32).solve(rhs.to(device, torch.float32))
    assert solution.dtype == torch.float32
    check([solution], [torch.linalg.solve(matrix, rhs)], device, tolerance=1e-4)


@devices
@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
def test_solves_of_a_batch(method, device):
    factors = [dense.random_psd(5, 1, batch=(3,)), FACTORS[1], FACTORS[2]]
    noise = _noise("constant", (3,))
    rhs = dense.randn(3, len(INDEX), 2)
    operator = dense.build(move(factors, device), INDEX.to(device), noise.to(device))
    with settings.gap_method(method), linear_operator.settings.max_cholesky_size(0):
        solution = operator.solve(rhs.to(device))
    check([solution], [torch.linalg.solve(dense.system(factors, INDEX, noise), rhs)], device)


@devices
@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize("name", ["FillGaps", "PenalizedGaps"])
def test_solves_of_the_other_operators(name, rank, max_cholesky, device):
    operator, matrix, inputs, own_inputs, num_factors = make(name, device)
    rhs, weights = dense.randn(len(matrix), 2), dense.randn(len(matrix), 2, seed=1)
    with settings.preconditioner_rank(rank), linear_operator.settings.max_cholesky_size(max_cholesky):
        solution = operator.solve(rhs.to(device))
        got = with_gradients(solution, weights.to(device), inputs, num_factors)
    check(got, with_gradients(torch.linalg.solve(matrix, rhs), weights, own_inputs, num_factors), device)


@on_standin
@pytest.mark.parametrize(
    ("method", "rank"),
    [("ignore", 0), ("ignore", 20), ("fill", 0), ("fill", 20), ("spectral", None), ("penalize", None)],
)
def test_waits_of_twenty_iterations(method, rank):
    """One every ten: whatever a method looks at, it is read at once."""
    factors = standin.to_standin([dense.matern32(30, 0.1), dense.matern32(20, 0.1)])
    index, noise = dense.observed("block", (30, 20)), torch.full((1,), 1e-4, dtype=torch.float64)
    operator = dense.build(factors, *standin.to_standin((index, noise)))
    rhs = standin.to_standin(dense.randn(len(index), 2))
    counts, iterations = [], []
    for budget in (20, 40):
        with (
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
            settings.max_iterations(budget),
            warnings.catch_warnings(),
            record_solves() as solves,
        ):
            warnings.simplefilter("ignore")
            operator.solve(rhs)  # eigen-decompositions, preconditioners
            with count_transfers() as count:
                operator.solve(rhs)
        counts.append(count)
        iterations.append(solves[-1].iterations)
    assert iterations == [20, 40]
    assert [count.copies for count in counts] == [0, 0]
    assert counts[1].syncs - counts[0].syncs <= 2, counts[1].by_line


# -- log-determinants ------------------------------------------------------------------------------------------------


def _likelihood(operator, rhs, inputs, num_factors):
    quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    return [quad.detach(), *with_gradients(logdet + 0.5 * quad, torch.ones_like(quad), inputs, num_factors)]


@devices
@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("kind", NOISES)
def test_exact_logdets_stay_on_their_device(kind, max_cholesky, device):
    operator, matrix, inputs, own_inputs, num_factors = make(f"SelectedKroneckerAddedDiag, {kind}", device)
    rhs = dense.randn(len(INDEX), 2)
    with (
        settings.logdet_method("exact"),
        linear_operator.settings.max_cholesky_size(max_cholesky),
        count_transfers() as counts,
    ):
        got = _likelihood(operator, rhs.to(device), inputs, num_factors)
    assert counts.within(gaps).copies == 0, counts.by_line
    quad = (rhs * torch.linalg.solve(matrix, rhs)).sum()
    value = torch.linalg.slogdet(matrix).logabsdet + 0.5 * quad
    expected = with_gradients(value, torch.ones((), dtype=torch.float64), own_inputs, num_factors)
    check(got, [quad, *expected], device)


@devices
def test_exact_logdet_from_the_gaps(device, monkeypatch):
    """The smaller side, where the data side is not cheap."""
    monkeypatch.setattr("gpytorch_gaps.solvers.planning.logdet._CHEAP_CHOLESKY_ROWS", 0)
    index, one = dense.observed("one gap", SHAPE), torch.ones((), dtype=torch.float64)
    factors, noise, inputs = dense.with_leaves(move(FACTORS, device), _noise("constant").to(device))
    with linear_operator.settings.max_cholesky_size(10), record_solves() as solves:
        value = dense.build(factors, index.to(device), noise).logdet()
    assert solves.logdets[-1].reason == "gaps side"
    got = with_gradients(value, one.to(device), inputs, len(factors))
    factors, noise, inputs = dense.with_leaves(FACTORS, _noise("constant"))
    value = torch.linalg.slogdet(dense.system(factors, index, noise)).logabsdet
    check(got, with_gradients(value, one, inputs, len(factors)), device)


@devices
@pytest.mark.parametrize("kind", ["constant", "per axis"])
def test_nystrom_logdets_stay_on_their_device(kind, device):
    """Biased, so compared with itself on the CPU."""
    rhs, results = dense.randn(len(INDEX), 2), []
    for where in (device, CPU):
        operator, _, inputs, _, num_factors = make(f"SelectedKroneckerAddedDiag, {kind}", where)
        with settings.logdet_method("nystrom"):
            results.append(_likelihood(operator, rhs.to(where), inputs, num_factors))
    check(*results, device)


@devices
@pytest.mark.parametrize("rank", [None, 0, 20])
@pytest.mark.parametrize("kind", NOISES)
def test_stochastic_logdets_stay_on_their_device(kind, rank, device):
    """Within five standard errors; and on the stand-in, whose random numbers are the CPU's, equal to the CPU's."""
    rhs, results = dense.randn(len(INDEX), 2), []
    for where in (device, CPU):
        operator, matrix, inputs, _, num_factors = make(f"SelectedKroneckerAddedDiag, {kind}", where)
        torch.manual_seed(0)
        with (
            settings.logdet_method("stochastic"),
            settings.preconditioner_rank(rank),
            linear_operator.settings.max_cholesky_size(0),
            linear_operator.settings.num_trace_samples(30),
            record_solves() as solves,
            count_transfers() as counts,
        ):
            results.append(_likelihood(operator, rhs.to(where), inputs, num_factors))
        report = solves.logdets[-1]
        assert report.method == "stochastic"
        assert counts.within(gaps).copies == 0, counts.by_line
        assert {t.device for t in (*results[-1], report.value, report.standard_error)} == {where}
        error = abs(float(report.value) - float(torch.logdet(matrix.detach())))
        assert error <= 5 * float(report.standard_error) + 1e-6
    if device == standin.DEVICE:
        check(*results, device)


@devices
@pytest.mark.parametrize("name", ["FillGaps", "PenalizedGaps"])
def test_logdets_of_the_other_operators(name, device):
    operator, matrix, inputs, own_inputs, num_factors = make(name, device)
    rhs = dense.randn(len(matrix), 2)
    got = _likelihood(operator, rhs.to(device), inputs, num_factors)
    quad = (rhs * torch.linalg.solve(matrix, rhs)).sum()
    value = torch.linalg.slogdet(matrix).logabsdet + 0.5 * quad
    expected = with_gradients(value, torch.ones((), dtype=torch.float64), own_inputs, num_factors)
    check(got, [quad, *expected], device)


@devices
@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize("name", ["FillGaps", "PenalizedGaps"])
def test_stochastic_logdets_of_the_other_operators(name, rank, device):
    results = []
    for where in (device, CPU):
        operator, matrix, inputs, _, num_factors = make(name, where)
        rhs = dense.randn(len(matrix), 2)
        torch.manual_seed(0)
        with settings.preconditioner_rank(rank), linear_operator.settings.max_cholesky_size(0):
            results.append(_likelihood(operator, rhs.to(where), inputs, num_factors))
        assert {value.device for value in results[-1]} == {where}
    check(results[0][:1], results[1][:1], device)
    if device == standin.DEVICE:
        check(*results, device)


class _AxisKernels(torch.nn.Module):
    """Hyperparameters of a kernel an axis, and the noise."""

    def __init__(self):
        super().__init__()
        self.kernels = torch.nn.ModuleList(
            [
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
                gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=2),
                gpytorch.kernels.PeriodicKernel(),
            ]
        )
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, grid, index):
        factors = [kernel(axis).to_dense() for kernel, axis in zip(self.kernels, grid.axes, strict=True)]
        return SelectedKroneckerOperator(*factors, row_index=index).add_diagonal(self.likelihood.noise)


@devices
@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
def test_training_steps_stay_on_their_device(method, device):
    """From GPyTorch's kernels on the axes to a step of Adam."""
    grid, index = gaps.CartesianGrid(AXES), dense.observed("random", (6, 5, 4))
    y, losses = dense.randn(len(index), 1), {}
    for where in (device, CPU):
        model, cells, rhs = _AxisKernels().double().to(where), grid.to(where), y.to(where)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        losses[where] = []
        for _ in range(2):
            optimizer.zero_grad()
            with settings.gap_method(method), count_transfers() as counts:
                quad, logdet = model(cells, index.to(where)).inv_quad_logdet(rhs, logdet=True)
                (quad + logdet).backward()
            optimizer.step()
            losses[where].append(float((quad + logdet).detach()))
            assert {parameter.grad.device for parameter in model.parameters()} == {where}
            assert counts.within(gaps).copies == 0, counts.by_line
    assert losses[device] == pytest.approx(losses[CPU], rel=EXACT)


# -- preconditioners -------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize(("shifted", "kind"), [(False, "constant"), (False, "per point"), (True, "constant")])
def test_preconditioners_stay_on_their_device(shifted, kind, rank, device):
    results = []
    x = dense.randn(len(GAPS if shifted else INDEX), 2)
    for where in (device, CPU):
        eigen, noise = kron_eigh(move(FACTORS, where)), _noise(kind).to(where)
        with count_transfers() as counts:
            if shifted:
                preconditioner = ShiftedEigenPreconditioner(eigen, GAPS.to(where), noise, rank)
            else:
                preconditioner = EigenPreconditioner(eigen, INDEX.to(where), noise, rank)
        uploads = int(where == standin.DEVICE)  # of the index, by this test
        assert counts.copies == uploads, counts.by_line
        ours = x.to(where)
        with count_transfers() as counts:
            results.append([preconditioner.solve(ours), preconditioner.matmul(ours), preconditioner.logdet()])
        assert counts.events == []
    check(*results, device)


@devices
@pytest.mark.parametrize("kind", ["constant", "per point"])
def test_preconditioner_of_the_operator(kind, device):
    operator, *_ = make(f"SelectedKroneckerAddedDiag, {kind}", device)
    x = dense.randn(len(INDEX), 2)
    with settings.preconditioner_rank(20):
        solve, matrix, logdet = operator._preconditioner()
    assert logdet.device == device
    check([solve(matrix @ x.to(device))], [x], device)
    check([logdet], [torch.logdet(matrix.to_dense().detach().cpu())], device)


# -- grids -----------------------------------------------------------------------------------------------------------


@devices
def test_grids_move_and_are_looked_up_there(device):
    grid, moved = gaps.CartesianGrid(AXES), gaps.CartesianGrid(AXES).to(device)
    assert moved.device == device
    queries = torch.cat([grid.points()[::7], torch.full((1, 4), 0.5, dtype=torch.float64)])
    for ours in (moved, gaps.CartesianGrid(move(AXES, device))):
        assert ours.points().device == device
        assert torch.equal(ours.points().cpu(), grid.points())
        found = ours.index_of(queries.to(device))
        assert found.device == device
        assert torch.equal(found.cpu(), grid.index_of(queries))
        positions = ours.unravel(found[:-1].int())
        assert positions.dtype == torch.int64
        assert torch.equal(ours.ravel(positions).cpu(), found[:-1].cpu())


@on_standin
def test_looking_up_cells_copies_nothing():
    grid = standin.to_standin(gaps.CartesianGrid(AXES))
    with count_transfers() as counts:
        grid.index_of(grid.points())
    assert counts.copies == 0
    assert counts.syncs <= 2  # that indices are cells of the grid, that coordinates are finite


@on_standin
def test_what_lives_elsewhere_is_refused():
    grid, device = standin.to_standin(gaps.CartesianGrid(AXES)), standin.DEVICE
    with pytest.raises(ValueError, match=f"on cpu; expected torch.float64 on {device}"):
        grid.index_of(grid.points().cpu())
    factors = standin.to_standin(FACTORS)
    with pytest.raises(ValueError, match="row_index: is on cpu"):
        SelectedKroneckerOperator(*factors, row_index=INDEX)
    with pytest.raises(ValueError, match="axis 2 is on cpu"):
        SelectedKroneckerOperator(*factors[:2], FACTORS[2])


@devices
def test_arrays_become_data_on_their_device(device):
    values = dense.randn(*SHAPE)
    values[values > 0.5] = torch.nan
    expected = gaps.from_array(values, [torch.arange(size).double() for size in SHAPE])
    grid, *data = gaps.from_array(values.to(device), [torch.arange(size).double().to(device) for size in SHAPE])
    assert grid.device == device
    check(data, expected[1:], device, tolerance=0.0)
