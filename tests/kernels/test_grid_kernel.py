"""The grid kernel against an explicit product of its axis kernels, for every kind of input; look-ups; errors."""

import copy
import io
import pickle
import re

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import IndexKernel, Kernel, LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, NormalPrior
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator

from gpytorch_gaps import CartesianGrid, GappyGridKernel
from gpytorch_gaps.grid import cells
from gpytorch_gaps.kernels import grid_kernel as gappy_grid_kernel
from gpytorch_gaps.operators import KhatriRaoOperator, SelectedKroneckerOperator
from tests import _dense as dense
from tests._covering import covering

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def line(size, start=0.0, stop=1.0):
    return torch.linspace(start, stop, size, dtype=torch.float64)


def stations(size=5):
    return dense.randn(size, 2, seed=3)


def make(batch_shape=()):
    """Three axes, the second a group of two columns."""
    grid = CartesianGrid([line(6), stations(), line(4, -1.0)])
    batch = torch.Size(batch_shape)
    kernels = [
        RBFKernel(batch_shape=batch),
        MaternKernel(nu=1.5, ard_num_dims=2, batch_shape=batch),
        PeriodicKernel(batch_shape=batch),
    ]
    kernel = GappyGridKernel(kernels, grid).double()
    for i, own in enumerate(kernels):
        spread = 0.1 * torch.arange(batch.numel(), dtype=torch.float64).view(*batch, 1, 1)
        own.lengthscale = (0.3 + 0.2 * i + spread).expand_as(own.lengthscale)
    return kernel


def product(kernel, x1, x2):
    """The product by definition: kernel by kernel, on the columns of each axis."""
    value = 1.0
    for own, columns in zip(kernel.kernels, kernel.grid.columns, strict=True):
        value = value * own(x1[..., columns], x2[..., columns]).to_dense()
    return value


def some_cells(grid, count, seed=0):
    return grid.points(torch.randperm(grid.num_cells, generator=torch.Generator().manual_seed(seed))[:count])


def scattered(grid, count, seed=0):
    return dense.randn(count, grid.num_columns, seed=seed)


def own_grid(grid):
    """A finer grid on the first axis, a shifted one on the last, two new stations."""
    return CartesianGrid([line(11), dense.randn(2, 2, seed=8), line(3, -0.7, 0.7)]).points()


INPUTS = {
    "all cells": lambda grid: grid.points(),
    "most cells": lambda grid: some_cells(grid, 80),
    "a few cells": lambda grid: some_cells(grid, 7, seed=1),
    "a block of cells": lambda grid: grid.points().reshape(6, 5, 4, -1)[1:4, ::2, 2].reshape(-1, 4),
    "a grid of their own": own_grid,
    "scattered": lambda grid: scattered(grid, 23),
    "on and off the grid": lambda grid: torch.cat([some_cells(grid, 20), scattered(grid, 9)]),
    "repeated rows": lambda grid: some_cells(grid, 9)[torch.tensor([0, 3, 3, 8, 0, 1, 1, 1])],
    "one cell": lambda grid: some_cells(grid, 1),
    "one point": lambda grid: scattered(grid, 1),
    "permuted": lambda grid: grid.points().flip(0),
}


KINDS = ("most cells", "a grid of their own", "scattered", "on and off the grid")


@covering(first=INPUTS, second=KINDS, batch_shape=[(), (2,)])
def test_is_the_product_of_its_axes(first, second, batch_shape):
    kernel = make(batch_shape)
    x1, x2 = INPUTS[first](kernel.grid), INPUTS[second](kernel.grid)
    covariance, expected = kernel(x1, x2), product(kernel, x1, x2)
    assert covariance.shape == expected.shape
    assert torch.allclose(covariance.to_dense(), expected, **EXACT)
    evaluated = covariance.evaluate_kernel()
    rhs, left = dense.randn(len(x2), 2), dense.randn(len(x1), 2, seed=1)
    assert torch.allclose(evaluated @ rhs, expected @ rhs, **EXACT)
    assert torch.allclose(evaluated.mT @ left, expected.mT @ left, **EXACT)
    if len(x1) == len(x2):
        assert torch.allclose(kernel(x1, x2, diag=True), expected.diagonal(dim1=-1, dim2=-2), **EXACT)


@settings(max_examples=40)
@given(st.data())
def test_it_is_the_product_of_its_axes_at_any_rows(data):
    """Rows drawn with repeats from cells, from another grid and from anywhere."""
    kernel = make()
    pool = torch.cat([kernel.grid.points(), own_grid(kernel.grid), scattered(kernel.grid, 10)])
    rows = [data.draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=12)) for _ in range(2)]
    x1, x2 = pool[rows[0]], pool[rows[1]]
    assert torch.allclose(kernel(x1, x2).to_dense(), product(kernel, x1, x2), **EXACT)


TYPES = [
    ("all cells", "all cells", SelectedKroneckerOperator),
    ("most cells", "most cells", SelectedKroneckerOperator),
    ("a few cells", "a few cells", SelectedKroneckerOperator),
    ("repeated rows", "repeated rows", SelectedKroneckerOperator),
    ("one cell", "most cells", SelectedKroneckerOperator),
    ("permuted", "most cells", SelectedKroneckerOperator),
    ("a grid of their own", "most cells", SelectedKroneckerOperator),
    ("most cells", "a grid of their own", SelectedKroneckerOperator),
    ("a grid of their own", "a grid of their own", SelectedKroneckerOperator),
    ("scattered", "most cells", KhatriRaoOperator),
    ("most cells", "scattered", KhatriRaoOperator),
    ("on and off the grid", "most cells", KhatriRaoOperator),
    ("scattered", "scattered", DenseLinearOperator),
    ("scattered", "on and off the grid", DenseLinearOperator),
]


@pytest.mark.parametrize(("first", "second", "kind"), TYPES)
def test_the_operator_fits_the_kind_of_inputs(first, second, kind):
    kernel = make()
    covariance = kernel(INPUTS[first](kernel.grid), INPUTS[second](kernel.grid)).evaluate_kernel()
    assert type(covariance) is kind


def test_factors_of_the_covariance():
    """Those of the whole axes in training; of the coordinates at hand in a prediction."""
    kernel = make()
    train = INPUTS["most cells"](kernel.grid)
    covariance = kernel(train).evaluate_kernel()
    assert [tuple(factor.shape) for factor in covariance.factors] == [(6, 6), (5, 5), (4, 4)]
    assert covariance.is_symmetric
    assert torch.equal(covariance.row_index, kernel.grid.index_of(train))
    block = kernel(INPUTS["a block of cells"](kernel.grid), train).evaluate_kernel()
    assert [tuple(factor.shape) for factor in block.factors] == [(3, 6), (3, 5), (1, 4)]
    finer = kernel(INPUTS["a grid of their own"](kernel.grid), train).evaluate_kernel()
    assert [tuple(factor.shape) for factor in finer.factors] == [(11, 6), (2, 5), (3, 4)]


# -- batches of inputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_shape", [(), (2,), (3, 1)])
@pytest.mark.parametrize("where", ["most cells", "scattered", "a grid of their own"])
def test_a_batch_that_shares_its_points(where, batch_shape):
    kernel = make(batch_shape)
    x, train = INPUTS[where](kernel.grid), INPUTS["most cells"](kernel.grid)
    expected = product(kernel, x, train)
    for shared in (x.expand(2, *x.shape), x.repeat(2, 1, 1)):
        covariance = kernel(shared, train).evaluate_kernel()
        assert isinstance(covariance, SelectedKroneckerOperator | KhatriRaoOperator)
        assert covariance.shape == (*torch.broadcast_shapes((2,), batch_shape), len(x), len(train))
        assert torch.allclose(covariance.to_dense(), expected.expand(covariance.shape), **EXACT)


@pytest.mark.parametrize("batch_shape", [(), (2,), (3, 1)])
def test_a_batch_of_different_points(batch_shape):
    kernel = make(batch_shape)
    x1 = torch.stack([some_cells(kernel.grid, 9), some_cells(kernel.grid, 9, seed=1)])
    x2 = torch.stack([scattered(kernel.grid, 5), some_cells(kernel.grid, 5, seed=2)])
    for first, second in [(x1, x2), (x1, x1), (x1, x2[0]), (x2[1], x1)]:
        covariance = kernel(first, second)
        members = torch.broadcast_shapes((2,), batch_shape)
        assert covariance.shape == (*members, first.size(-2), second.size(-2))
        both = (x.expand(2, *x.shape[-2:]) for x in (first, second))
        for i, (one, other) in enumerate(zip(*both, strict=True)):
            own = product(kernel, one, other).expand(*members, -1, -1)
            assert torch.allclose(covariance.to_dense()[..., i, :, :], own[..., i, :, :], **EXACT)
    assert kernel(x1, x1, diag=True).shape == (*members, 9)


def test_an_empty_batch_and_no_points():
    kernel = make()
    assert kernel(torch.zeros(0, 3, 4).double(), kernel.grid.points()).to_dense().shape == (0, 3, 120)
    assert kernel(kernel.grid.points()[:0], kernel.grid.points()).to_dense().shape == (0, 120)


# -- gradients -------------------------------------------------------------------------------------------------------


def gradients(value, inputs):
    return torch.autograd.grad((value * dense.randn(*value.shape, seed=5)).sum(), inputs)


@pytest.mark.parametrize("second", ["most cells", "a grid of their own", "scattered"])
@pytest.mark.parametrize("first", ["most cells", "a grid of their own", "scattered", "on and off the grid"])
def test_gradients_of_parameters(first, second):
    kernel = make((2,))
    x1, x2 = INPUTS[first](kernel.grid), INPUTS[second](kernel.grid)
    parameters = list(kernel.parameters())
    rhs = dense.randn(len(x2), 3)
    got = gradients(kernel(x1, x2).evaluate_kernel() @ rhs, parameters)
    expected = gradients(product(kernel, x1, x2) @ rhs, parameters)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("second", ["most cells", "scattered"])
@pytest.mark.parametrize("first", ["most cells", "a grid of their own", "scattered"])
def test_gradients_of_the_points(first, second, which):
    """A look-up has no derivative, so points that want one are not looked up."""
    kernel = make()
    pairs = zip((first, second), which, strict=True)
    x1, x2 = (INPUTS[name](kernel.grid).clone().requires_grad_(free) for name, free in pairs)
    wanted = [x for x in (x1, x2) if x.requires_grad]
    parameters = [*wanted, *kernel.parameters()]
    got, expected = kernel(x1, x2).to_dense(), product(kernel, x1, x2)
    assert torch.allclose(got, expected, **EXACT)
    for ours, theirs in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_of_the_points_where_both_are_the_same_tensor():
    """``kernel(x)``, also of equal copies of which one only wants a gradient."""
    kernel = make()
    x = INPUTS["most cells"](kernel.grid).clone().requires_grad_()
    for second in (x, x.detach().clone()):
        got, expected = gradients(kernel(x, second).to_dense(), [x]), gradients(product(kernel, x, second), [x])
        assert torch.allclose(got[0], expected[0], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert isinstance(kernel(x).evaluate_kernel(), SelectedKroneckerOperator)


# -- any kernel on an axis -------------------------------------------------------------------------------------------


class Deep(Kernel):
    """A network, and a kernel of what it makes of its inputs."""

    has_lengthscale = False

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.base = RBFKernel()

    def forward(self, x1, x2, **params):
        return self.base(self.network(x1), self.network(x2), **params)


def test_a_deep_kernel():
    torch.manual_seed(0)
    grid = CartesianGrid([stations(7), line(5)])
    kernel = GappyGridKernel([Deep(), MaternKernel()], grid).double()
    for x in (some_cells(grid, 20), scattered(grid, 9)):
        train = grid.points()
        covariance, expected = kernel(x, train).to_dense(), product(kernel, x, train)
        assert torch.allclose(covariance, expected, **EXACT)
        parameters = list(kernel.parameters())
        for ours, theirs in zip(gradients(covariance, parameters), gradients(expected, parameters), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    assert sum(name.startswith("kernels.0.network") for name, _ in kernel.named_parameters()) == 4


def with_outputs(tasks=3, **kwargs):
    torch.manual_seed(1)
    grid = CartesianGrid([line(6), torch.arange(3).double()])
    return GappyGridKernel([RBFKernel(), IndexKernel(num_tasks=tasks, rank=1)], grid, **kwargs).double()


def test_an_index_kernel():
    kernel = with_outputs()
    between = kernel.kernels[1].covar_matrix.to_dense()
    x, off = kernel.grid.points(), torch.tensor([[0.123, 2.0], [0.5, 0.0], [0.77, 1.0]], dtype=torch.float64)
    own = torch.cartesian_prod(line(9, 0.05), torch.tensor([0.0, 2.0], dtype=torch.float64))
    for first in (x, off, own):
        for second in (x, off):
            over = kernel.kernels[0](first[:, :1], second[:, :1]).to_dense()
            expected = over * between[first[:, 1].long()][:, second[:, 1].long()]
            assert torch.allclose(kernel(first, second).to_dense(), expected, **EXACT)
        assert torch.allclose(kernel(first, diag=True), between.diagonal()[first[:, 1].long()], **EXACT)


@pytest.mark.parametrize("bad", [0.5, 3.0, -1.0])
def test_codes_of_an_index_kernel_are_checked(bad):
    """It would cut 0.5 down to 0, count -1 from the end, and read beyond its matrix."""
    kernel = with_outputs()
    wrong = re.escape(f"x: the column of axis 1: got {bad:g}, expected the codes 0 to 2 of its IndexKernel")
    scattered_x = torch.tensor([[0.1, 0.0], [0.123, bad], [0.7, 1.0], [0.9, 2.0], [0.31, 1.0]], dtype=torch.float64)
    own = torch.cartesian_prod(line(9, 0.05), torch.tensor([0.0, bad], dtype=torch.float64))
    for x in (scattered_x, own, scattered_x.clone().requires_grad_(), torch.stack([own, own.flip(0)])):
        for pair in ((x, kernel.grid.points()), (kernel.grid.points(), x), (x, x)):
            for _ in range(2):  # also where the look-up is remembered
                with pytest.raises(ValueError, match=wrong):
                    kernel(*pair).to_dense()
        with pytest.raises(ValueError, match=wrong):
            kernel(x, diag=True)


def test_codes_are_checked_where_an_index_kernel_is_inside_another_and_on_the_grid():
    grid = CartesianGrid([line(4), line(3)])
    with pytest.raises(ValueError, match=r"grid: axis 1: got 0\.5, expected the codes 0 to 2"):
        GappyGridKernel([RBFKernel(), ScaleKernel(IndexKernel(num_tasks=3))], grid)
    with pytest.raises(ValueError, match=r"grid: axis 1: got 2, expected the codes 0 to 1"):
        with_outputs(tasks=2)


def test_codes_of_an_index_kernel_multiplied_from_outside_are_checked():
    """It shares the look-ups of the grid kernel it meets, but not its check."""
    grid = CartesianGrid([line(6), torch.arange(3).double()])
    base = GappyGridKernel([RBFKernel(), RBFKernel()], grid)
    kernel = (base * IndexKernel(num_tasks=3, active_dims=[1])).double()
    own = torch.cartesian_prod(line(9, 0.05), torch.tensor([0.0, 0.5], dtype=torch.float64))
    base(own, grid.points()).to_dense()
    with pytest.raises(ValueError, match=r"got 0\.5, expected the codes 0 to 2"):
        kernel(own, grid.points()).to_dense()


def test_priors_and_constraints():
    grid = CartesianGrid([line(5), line(4)])
    kernels = [
        RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0), lengthscale_constraint=Interval(0.05, 2.0)),
        PeriodicKernel(period_length_prior=NormalPrior(1.0, 0.1), period_length_constraint=GreaterThan(0.5)),
    ]
    kernel = GappyGridKernel(kernels, grid)
    x = grid.points()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = gpytorch.models.ExactGP(x, x[:, 0], likelihood)
    model.covar_module = ScaleKernel(kernel, outputscale_prior=GammaPrior(2.0, 1.0))
    priors = {name: closure(module) for name, module, prior, closure, _ in model.named_priors()}
    assert set(priors) == {
        "covar_module.outputscale_prior",
        "covar_module.base_kernel.kernels.0.lengthscale_prior",
        "covar_module.base_kernel.kernels.1.period_length_prior",
    }
    assert priors["covar_module.base_kernel.kernels.0.lengthscale_prior"] is not None
    names = [name for name, _ in kernel.named_constraints()]
    assert "kernels.0.raw_lengthscale_constraint" in names
    assert "kernels.1.raw_period_length_constraint" in names
    with torch.no_grad():
        kernels[0].raw_lengthscale.fill_(50.0)
        assert float(kernels[0].lengthscale) <= 2.0


def test_it_is_stationary_where_its_axes_are():
    grid = CartesianGrid([line(3), line(2)])
    assert GappyGridKernel([RBFKernel(), MaternKernel()], grid).is_stationary
    assert not GappyGridKernel([RBFKernel(), LinearKernel()], grid).is_stationary


def test_active_dims_select_columns_at_every_level():
    """`active_dims` of the kernel, of an axis, and inside a ScaleKernel, which passes them on."""
    grid = CartesianGrid([line(6), stations()])
    own = [RBFKernel(), MaternKernel(active_dims=[1])]  # the second column of its axis only
    plain = GappyGridKernel(own, grid).double()
    picking = GappyGridKernel(own, grid, active_dims=[3, 0, 1]).double()
    x = some_cells(grid, 11)
    wide = torch.stack([x[:, 1], x[:, 2], torch.full((11,), torch.nan), x[:, 0]], -1).double()
    wide[:, 2] = dense.randn(11)
    covariance = picking(wide).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerOperator)
    assert torch.allclose(covariance.to_dense(), product(plain, x, x), **EXACT)
    scaled = ScaleKernel(picking).double()
    scaled.outputscale = 2.0
    assert torch.allclose(scaled(wide, wide[:3]).to_dense(), 2 * product(plain, x, x[:3]), **EXACT)
    assert torch.allclose(scaled(wide, diag=True), torch.full((11,), 2.0, dtype=torch.float64), **EXACT)


# -- look-ups --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lookups(monkeypatch):
    """How many look-ups were made."""
    counted = []
    for name in ("on_grid", "own_grid"):
        original = getattr(cells, name)

        def counting(grid, x, original=original, name=name):
            counted.append(name)
            return original(grid, x)

        monkeypatch.setattr(gappy_grid_kernel, name, counting)
    return counted


def test_the_same_points_are_looked_up_once(lookups):
    kernel = make()
    x = INPUTS["most cells"](kernel.grid)
    index = kernel(x).evaluate_kernel().row_index
    assert len(lookups) == 1
    again = [kernel(other).evaluate_kernel() for other in (x, x.clone(), x.expand(2, *x.shape))]
    assert all(covariance.row_index is index for covariance in again)
    assert all(covariance.col_index is index for covariance in again)
    assert kernel.cells_of(x).index is index
    assert len(lookups) == 1
    scattered_x = scattered(kernel.grid, 30)
    for _ in range(3):
        kernel(scattered_x, x).to_dense()
    assert lookups[1:] == ["on_grid", "own_grid"]  # of the scattered points, once


@pytest.mark.parametrize("how", ["in place", "data", "numpy"])
def test_points_changed_in_place_are_looked_up_again(how):
    kernel = make()
    x = INPUTS["most cells"](kernel.grid).contiguous()
    before = kernel(x).to_dense()
    changed = x.flip(0).clone()
    if how == "in place":
        x.copy_(changed)
    elif how == "data":
        x.data[:] = changed
    else:
        x.numpy()[:] = changed.numpy()
    assert torch.equal(x, changed)
    assert torch.allclose(kernel(x).to_dense(), before.flip(0, 1), **EXACT)
    x.numpy()[0, 0] += 0.01  # off the grid
    assert torch.allclose(kernel(x).to_dense(), product(kernel, x, x), **EXACT)


def test_a_grid_that_is_loaded_is_looked_up_again():
    kernel, other = make(), make()
    x = INPUTS["most cells"](kernel.grid)
    kernel(x).to_dense()
    state = other.grid.state_dict()
    state["axis_0"] = state["axis_0"].flip(0)
    with pytest.raises(ValueError, match=r"state_dict: grid\.axis_0 is not axis 0 of this model's grid"):
        kernel.load_state_dict({**other.state_dict(), "grid.axis_0": state["axis_0"]})
    kernel.grid.load_state_dict(state)  # whoever insists
    assert torch.equal(kernel(x).evaluate_kernel().row_index, kernel.grid.index_of(x))
    assert torch.allclose(kernel(x).to_dense(), product(kernel, x, x), **EXACT)
    state["axis_0"] = state["axis_0"] + 0.01
    kernel.grid.load_state_dict(state)  # x is off the grid now
    assert torch.allclose(kernel(x).to_dense(), product(kernel, x, x), **EXACT)
    assert torch.allclose(kernel(x, kernel.grid.points()).to_dense(), product(kernel, x, kernel.grid.points()), **EXACT)


def test_a_cast_moves_the_grid_too():
    kernel = make()
    x = INPUTS["most cells"](kernel.grid)
    expected = kernel(x).to_dense()
    kernel.float()
    assert kernel.grid.dtype == torch.float32
    covariance = kernel(x.float()).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerOperator)
    assert covariance.dtype == torch.float32
    assert torch.allclose(covariance.to_dense().double(), expected, atol=1e-5)
    kernel.double()
    again = kernel(x.float().double()).evaluate_kernel()
    assert isinstance(again, SelectedKroneckerOperator)
    assert torch.allclose(again.to_dense(), expected, atol=1e-5)


def test_a_cast_there_and_back_still_knows_its_own_cells():
    """Axes are then other tensors with the same numbers, and what was looked up before is found again."""
    grid = CartesianGrid([torch.arange(5).double(), torch.arange(4).double()])
    kernel = GappyGridKernel([RBFKernel(), RBFKernel()], grid).double()
    x = grid.points()
    kernel(x).to_dense()
    kernel.float().double()
    found = kernel.cells_of(x)
    assert all(a is b for a, b in zip(found.axes, kernel.grid.axes, strict=True))


def test_copies_start_without_look_ups():
    kernel = make()
    x = INPUTS["most cells"](kernel.grid)
    expected = kernel(x).to_dense()
    for twin in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert not twin._lookups._entries
        assert torch.equal(twin(x).to_dense(), expected)
        with torch.no_grad():
            twin.grid.axis_0.add_(1.0)  # another grid altogether
        assert torch.equal(kernel(x).to_dense(), expected)
        assert isinstance(kernel(x).evaluate_kernel(), SelectedKroneckerOperator)


def test_a_saved_state_gives_the_same_kernel():
    kernel, twin = make(), make()
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.3)
    file = io.BytesIO()
    torch.save(kernel.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {name for name in state if name.startswith("grid.")} == {"grid.axis_0", "grid.axis_1", "grid.axis_2"}
    twin.load_state_dict(state)
    x = INPUTS["on and off the grid"](kernel.grid)
    assert torch.equal(twin(x).to_dense(), kernel(x).to_dense())


# -- batches of kernels ----------------------------------------------------------------------------------------------


def test_the_batch_shape_is_that_of_the_axes_together():
    assert make().batch_shape == ()
    assert make((2,)).batch_shape == (2,)
    grid = CartesianGrid([line(3), line(2)])
    batches = torch.Size([2, 1]), torch.Size([3])
    kernel = GappyGridKernel([RBFKernel(batch_shape=batch) for batch in batches], grid)
    assert kernel.batch_shape == (2, 3)
    assert kernel.double()(grid.points()).evaluate_kernel().shape == (2, 3, 6, 6)


@pytest.mark.parametrize("where", ["most cells", "scattered"])
def test_an_expanded_kernel_repeats_itself(where):
    kernel = make()
    x = INPUTS[where](kernel.grid)
    expected = kernel(x).to_dense()
    for wide in (kernel.expand_batch(2, 3), kernel.expand_batch(torch.Size([2, 3])), kernel.expand_batch([2, 3])):
        assert wide.batch_shape == (2, 3)
        assert wide.grid is kernel.grid
        assert torch.allclose(wide(x).to_dense(), expected.expand(2, 3, *expected.shape), **EXACT)
    assert kernel.expand_batch(torch.Size()) is kernel


@pytest.mark.parametrize("index", [0, 1, -1, slice(1, None), (slice(None), 0), (1, slice(2))])
def test_a_member_of_a_batch_is_that_of_the_product(index):
    kernel = make((2, 3))
    x = INPUTS["most cells"](kernel.grid)
    member = kernel[index]
    expected = product(kernel, x, x)[index]
    assert member.batch_shape == expected.shape[:-2]
    assert torch.allclose(member(x).to_dense(), expected, **EXACT)
    assert torch.allclose(kernel(x)[index].to_dense(), expected, **EXACT)


def test_getitem_of_kernels_whose_batches_broadcast():
    grid = CartesianGrid([line(3), line(2)])
    first = RBFKernel(batch_shape=torch.Size([2]))
    kernel = GappyGridKernel([first, MaternKernel()], grid, active_dims=[1, 0]).double()
    first.lengthscale = torch.tensor([0.2, 0.6]).double().view(2, 1, 1)
    x = grid.points().flip(-1)
    assert torch.allclose(kernel[1](x).to_dense(), kernel(x).to_dense()[1], **EXACT)
    assert kernel[1].active_dims.tolist() == [1, 0]
    assert make()[0].batch_shape == ()


# -- errors ----------------------------------------------------------------------------------------------------------

GRID = CartesianGrid([line(4), stations(3)])


def sound(**kwargs):
    return GappyGridKernel([RBFKernel(), MaternKernel()], GRID, **kwargs).double()


def mixed():
    """A grid in double precision and kernels in single precision."""
    return GappyGridKernel([RBFKernel().float(), MaternKernel().float()], GRID)


def at(x):
    return sound()(x).to_dense()


POINTS = GRID.points()
ERRORS = {
    "too few kernels": (lambda: GappyGridKernel([RBFKernel()], GRID), "kernels: got 1, expected one for each"),
    "too many kernels": (lambda: GappyGridKernel([RBFKernel()] * 3, GRID), "kernels: got 3, expected one for each"),
    "not a kernel": (
        lambda: GappyGridKernel([RBFKernel(), torch.nn.Linear(1, 1)], GRID),
        "kernels: axis 1: got Linear, expected a gpytorch kernel",
    ),
    "a kernel class": (
        lambda: GappyGridKernel([RBFKernel, RBFKernel()], GRID),
        "kernels: axis 0: got type, expected a gpytorch kernel",
    ),
    "not a grid": (
        lambda: GappyGridKernel([RBFKernel()], [line(3)]),
        "grid: got list, expected a CartesianGrid",
    ),
    "ard of another number": (
        lambda: GappyGridKernel([RBFKernel(), MaternKernel(ard_num_dims=3)], GRID),
        "kernels: axis 1: got ard_num_dims=3, expected 2, the columns of that axis",
    ),
    "active_dims of another number": (lambda: sound(active_dims=[0, 1]), "active_dims: got 2, expected 3"),
    "columns": (
        lambda: at(dense.randn(5, 4)),
        "x1: got 4 columns, expected the grid's 3; pass active_dims to pick the grid's",
    ),
    "columns of x2": (lambda: sound()(POINTS, dense.randn(5, 2)).to_dense(), "2"),
    "dtype": (lambda: at(POINTS.float()), "x1: got torch.float32 on cpu, expected torch.float64 on cpu, as the grid"),
    "dtype of a parameter": (
        lambda: mixed()(POINTS).to_dense(),
        "but kernels.0.raw_lengthscale is torch.float32 on cpu; expected the same: model.to(torch.float64)",
    ),
    "last_dim_is_batch": (
        lambda: sound().forward(POINTS, POINTS, last_dim_is_batch=True),
        "last_dim_is_batch: got True, expected False",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments_are_named(case):
    """The argument, what came, and what was expected."""
    do, message = ERRORS[case]
    expected = RuntimeError if case == "columns of x2" else ValueError  # GPyTorch's own, before we are asked
    with pytest.raises(expected, match=re.escape(message)):
        do()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("second", [False, True], ids=["x1", "x2"])
def test_points_that_are_not_finite(value, second):
    x = POINTS.clone()
    x[2, 1] = value
    kernel = sound()
    pair = (POINTS, x) if second else (x, POINTS)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"x: entry \(2, 1\) is {value}; expected finite coordinates"):
            kernel(*pair).to_dense()


def test_errors_through_a_model():
    """A model in single precision on a grid in double precision says how to cast."""
    kernel = ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel()], CartesianGrid([line(4), stations(3)])))
    with pytest.raises(ValueError, match=r"model\.double\(\) or model\.to"):
        kernel(POINTS.float()).to_dense()
