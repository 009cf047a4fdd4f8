"""Kernels on the sphere against brute force: distances of points in space, and along the surface."""

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.linalg.circulant import CirculantOperator
from tests import _dense as dense
from tests.workflow._pairs import Model

POLES = torch.linspace(-90, 90, 7, dtype=torch.float64)
CIRCLE = torch.arange(0, 360, 30, dtype=torch.float64)


def in_space(x):
    latitude, longitude = (x * math.pi / 180.0).unbind(-1)
    parts = [latitude.cos() * longitude.cos(), latitude.cos() * longitude.sin(), latitude.sin()]
    return torch.stack(parts, -1)


def brute_force(x1, x2, function, distance, radius=1.0):
    """A function of the chord, or of the angle between two directions."""
    chord = (in_space(x1).unsqueeze(-2) - in_space(x2).unsqueeze(-3)).square().sum(-1).sqrt()
    return function(radius * (chord if distance == "chordal" else 2.0 * (0.5 * chord).clamp(max=1.0).asin()))


FUNCTIONS = {
    "exponential": (lambda: MaternKernel(nu=0.5), lambda d: torch.exp(-d / 0.6)),
    "Matern": (lambda: MaternKernel(nu=1.5), lambda d: (1 + 3**0.5 * d / 0.6) * torch.exp(-(3**0.5) * d / 0.6)),
    "squared exponential": (RBFKernel, lambda d: torch.exp(-0.5 * (d / 0.6).square())),
    "scaled": (lambda: ScaleKernel(RBFKernel()), lambda d: math.log(2) * torch.exp(-0.5 * (d / 0.6).square())),
    "a sum": (
        lambda: RBFKernel() + MaternKernel(nu=0.5),
        lambda d: torch.exp(-0.5 * (d / 0.6).square()) + torch.exp(-d / 0.6),
    ),
    "a product": (
        lambda: RBFKernel() * MaternKernel(nu=0.5),
        lambda d: torch.exp(-0.5 * (d / 0.6).square() - d / 0.6),
    ),
}
CASES = [*((name, "chordal") for name in FUNCTIONS), ("exponential", "great_circle")]


def make(name, distance="chordal", radius=1.0):
    kernel = gaps.SphereKernel(FUNCTIONS[name][0](), distance, radius).double()
    for module in kernel.modules():
        if getattr(module, "has_lengthscale", False):
            module.lengthscale = 0.6
    return kernel


def points(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    special = torch.tensor(
        [[90, 0], [90, 77], [-90, 5], [0, 180], [0, -180], [12, 359.5], [12, -0.5], [12, 180], [-12, 0], [45, 400]]
    )
    scattered = torch.stack([180 * unit[:, 0] - 90, 720 * unit[:, 1] - 360], -1)
    return torch.cat([special.double(), scattered])


@pytest.mark.parametrize("radius", [1.0, 6371.0])
@pytest.mark.parametrize(("name", "distance"), CASES)
def test_scattered_points(name, distance, radius):
    kernel, function = make(name, distance, radius), FUNCTIONS[name][1]
    if radius != 1.0:
        for module in kernel.modules():
            if getattr(module, "has_lengthscale", False):
                module.lengthscale = 0.6 * radius
        unscaled, function = function, lambda d: unscaled(d / radius)
    x, y = points(), points(25, 1)
    # squares of distances in space are rounded where points are close or opposite; roots of them more so
    kind = {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(kernel(x, y).to_dense(), brute_force(x, y, function, distance, radius), **kind)
    torch.testing.assert_close(kernel(x).to_dense(), brute_force(x, x, function, distance, radius), **kind)
    expected = brute_force(x[:20], y[:20], function, distance, radius).diagonal()
    torch.testing.assert_close(kernel(x[:20], y[:20], diag=True), expected, **kind)
    assert torch.linalg.eigvalsh(kernel(points(80)[5:]).to_dense()).min() > -1e-10


def test_poles_and_the_date_line():
    kernel = make("Matern")
    x = points()
    covariance = kernel(x).to_dense()
    assert torch.equal(covariance, covariance.mT)
    for first, second in ((0, 1), (3, 4), (5, 6)):  # the same points
        torch.testing.assert_close(covariance[first], covariance[second], rtol=1e-14, atol=1e-14)
    south = kernel(x[2:3], torch.tensor([[-90.0, -120.0]], dtype=torch.float64))
    assert south.to_dense().item() == 1.0


def test_close_points_keep_their_digits():
    """A millimetre on the Earth, in metres."""
    kernel = gaps.SphereKernel(MaternKernel(nu=0.5), radius=6.371e6).double()
    kernel.base_kernel.lengthscale = torch.tensor(1e-3, dtype=torch.float64)
    step = 180.0 / math.pi * 1e-3 / 6.371e6
    x = torch.tensor([[0.0, 0.0], [step, 0.0], [0.0, step]], dtype=torch.float64)
    assert kernel(x).to_dense()[0, 1:].tolist() == pytest.approx([math.exp(-1.0)] * 2, rel=1e-9)


# -- on grids --------------------------------------------------------------------------------------------------------

REGIONS = {
    "the globe": (POLES, CIRCLE, (12,)),
    "the globe from -180": (POLES, CIRCLE - 180.0, (12,)),
    "both ends of the date line": (POLES, torch.linspace(-180, 180, 13, dtype=torch.float64), (12,)),
    "half of the globe": (POLES, CIRCLE[:6], (12,)),
    "a region": (dense.randn(5) * 10 + 40, torch.arange(10, 15, 0.5, dtype=torch.float64), (20,)),
    "some longitudes": (POLES, CIRCLE[torch.tensor([0, 1, 4, 6])], (12,)),
    "westwards": (POLES.flip(0), CIRCLE.flip(0), (12,)),
    "no divisor of the circle": (POLES, torch.arange(0, 350, 29, dtype=torch.float64), None),
    "one latitude": (torch.tensor([10.0], dtype=torch.float64), CIRCLE, (12,)),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize(("kernel", "distance"), [("Matern", "chordal"), ("exponential", "great_circle")])
def test_grids(name, kernel, distance):
    latitudes, longitudes, circle = REGIONS[name]
    grid = gaps.CartesianGrid([latitudes, longitudes])
    own, function = make(kernel, distance), FUNCTIONS[kernel][1]
    block = gaps.GappyGridKernel([own], grid, blocks=[(0, 1)])
    index = dense.observed("random", grid.shape)
    x = grid.points(index)
    covariance = block(x).evaluate_kernel()
    (factor,) = covariance.factors
    assert isinstance(factor, CirculantOperator)
    assert factor.num_dense == (len(latitudes), len(latitudes))
    if circle is not None:
        assert factor.torus == circle
    expected = brute_force(x, x, function, distance)
    kind = {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(covariance.to_dense(), expected, **kind)
    torch.testing.assert_close(covariance @ torch.eye(len(x), dtype=torch.float64), expected, **kind)
    # finer, shifted, and scattered
    finer = gaps.CartesianGrid([dense.randn(4) * 20, longitudes[:3] + 15.0]).points()
    for other in (finer, points(12)):
        torch.testing.assert_close(block(other, x).to_dense(), brute_force(other, x, function, distance), **kind)


def test_gradients():
    """Gradients with respect to every hyperparameter, on the grid and at scattered points."""
    grid = gaps.CartesianGrid([POLES, CIRCLE])
    own = make("a sum")
    block = gaps.GappyGridKernel([own], grid, blocks=[(0, 1)])
    x = grid.points(dense.observed("random", grid.shape))
    weights = dense.randn(len(x), 2)
    wanted = torch.autograd.grad((weights * (own(x).to_dense() @ weights.flip(0))).sum(), list(own.parameters()))
    got = torch.autograd.grad((weights * (block(x) @ weights.flip(0))).sum(), list(block.parameters()))
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.isfinite(theirs).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    rbf = make("squared exponential")
    free, other = points(6, 3)[10:].requires_grad_(True), points(5, 4)[10:]
    assert torch.autograd.gradcheck(lambda z: rbf(z, other).to_dense(), (free,))
    # a point and itself
    (gradient,) = torch.autograd.grad(rbf(free).to_dense().sum(), free)
    assert torch.isfinite(gradient).all()


def test_batches():
    lengths = torch.tensor([[[0.4]], [[1.3]]], dtype=torch.float64)
    batch = gaps.SphereKernel(MaternKernel(nu=1.5, batch_shape=torch.Size([2]))).double()
    batch.base_kernel.lengthscale = lengths
    single = [make("Matern") for _ in lengths]
    for kernel, length in zip(single, lengths, strict=True):
        kernel.base_kernel.lengthscale = length
    x, y = points(8), points(5, 1)
    assert batch.batch_shape == (2,)
    expected = torch.stack([kernel(x, y).to_dense() for kernel in single])
    torch.testing.assert_close(batch(x, y).to_dense(), expected)
    both = torch.stack([x, x.flip(0)])
    torch.testing.assert_close(
        batch(both, y.expand(2, -1, -1)).to_dense(), torch.stack([expected[0], expected[1].flip(0)])
    )
    torch.testing.assert_close(batch(both, diag=True), torch.ones(2, len(x), dtype=torch.float64))
    torch.testing.assert_close(single[0](both).to_dense()[1], single[0](x.flip(0)).to_dense())
    torch.testing.assert_close(batch[1](x, y).to_dense(), expected[1])
    expanded = single[0].expand_batch(torch.Size([3]))
    torch.testing.assert_close(expanded(x, y).to_dense(), expected[0].expand(3, -1, -1))
    grid = gaps.CartesianGrid([POLES, CIRCLE])
    block = gaps.GappyGridKernel([batch], grid, blocks=[(0, 1)])
    assert isinstance(block(grid.points()).evaluate_kernel().factors[0], CirculantOperator)
    eye = torch.eye(grid.num_cells, dtype=torch.float64)
    torch.testing.assert_close(block(grid.points()) @ eye, batch(grid.points()).to_dense())


def test_active_dims_and_further_axes():
    """A sphere inside a block with depth, its columns named, and time beside it."""
    grid = gaps.CartesianGrid([torch.arange(3).double(), POLES, CIRCLE, torch.arange(2).double()])
    sphere = gaps.SphereKernel(MaternKernel(nu=1.5), active_dims=[1, 2])
    block = gaps.GappyGridKernel([RBFKernel(active_dims=[0]) * sphere, RBFKernel()], grid, blocks=[(0, 1, 2), (3,)])
    block = block.double()
    covariance = block(grid.points()).evaluate_kernel()
    assert covariance.factors[0].torus == (12,)
    x = grid.points()
    expected = block.kernels[0](x[:, :3]).to_dense() * block.kernels[1](x[:, 3:]).to_dense()
    torch.testing.assert_close(covariance.to_dense(), expected)
    torch.testing.assert_close(sphere.double()(x[:, :3]).to_dense(), make_plain(x[:, 1:3]))


def make_plain(x):
    kernel = gaps.SphereKernel(MaternKernel(nu=1.5)).double()
    return kernel(x).to_dense()


def test_what_is_refused():
    for base, distance, message in (
        (LinearKernel(), "chordal", "base_kernel: got LinearKernel, expected a function of the distance"),
        (PeriodicKernel(), "chordal", "base_kernel: got PeriodicKernel, expected a function of the distance"),
        (ScaleKernel(RBFKernel() + LinearKernel()), "chordal", "base_kernel: got LinearKernel"),
        (RBFKernel(ard_num_dims=2), "chordal", "RBFKernel with ard_num_dims=2, expected None: there is one distance"),
        (RBFKernel(), "great_circle", r"RBFKernel, expected MaternKernel\(nu=0.5\): no smoother kernel"),
        (MaternKernel(nu=1.5) * MaternKernel(nu=0.5), "great_circle", r"MaternKernel, expected MaternKernel\(nu=0.5\)"),
        (RQKernel(), "great_circle", "use distance='chordal'"),
        (RBFKernel(), "euclidean", "distance: got 'euclidean', expected one of chordal, great_circle"),
    ):
        with pytest.raises(ValueError, match=message):
            gaps.SphereKernel(base, distance)
    for radius in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"radius: got .*, expected a number above 0"):
            gaps.SphereKernel(RBFKernel(), radius=radius)
    with pytest.raises(ValueError, match="x1: got 3 columns, expected latitude and longitude"):
        gaps.SphereKernel(RBFKernel())(torch.zeros(4, 3)).to_dense()
    with pytest.raises(ValueError, match="last_dim_is_batch"):
        gaps.SphereKernel(RBFKernel())(torch.zeros(4, 2), last_dim_is_batch=True).to_dense()


# -- a field on the globe --------------------------------------------------------------------------------------------


def fitted(values):
    grid, x, y = gaps.from_array(values, [POLES[1:-1], CIRCLE])
    kernel = gaps.GappyGridKernel([gaps.SphereKernel(MaternKernel(nu=1.5))], grid, blocks=[(0, 1)])
    model = Model(x, y, gaps.GappyGridLikelihood(), kernel).double()
    model.likelihood.noise = 0.05
    return model.eval(), grid


@pytest.mark.parametrize("iterative", [False, True])
def test_a_field_has_no_seam(iterative):
    """Turned by 90 degrees, as are its gaps: across the date line, that is where the array begins and ends."""
    values = dense.randn(5, 12)
    values[dense.randn(5, 12, seed=1) > 0.6] = torch.nan
    size = gaps.settings.dense_size(0) if iterative else gaps.settings.dense_size(1000)
    cholesky = gpytorch.settings.max_cholesky_size(0 if iterative else 1000)
    with torch.no_grad(), size, cholesky, gaps.settings.solve_tolerance(1e-10):
        results = []
        for field in (values, values.roll(3, 1)):
            model, grid = fitted(field)
            posterior = model(grid.points())
            results.append([posterior.mean.reshape(5, 12), posterior.variance.reshape(5, 12)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first.roll(3, 1), second, rtol=1e-8, atol=1e-8)
