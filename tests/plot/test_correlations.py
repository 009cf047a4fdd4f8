"""Learned kernels: curves and matrices are the kernel's own, and length-scales stand where they are."""

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from gpytorch.kernels import (
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from matplotlib.figure import Figure

import gpytorch_gaps as gaps
from gpytorch_gaps import plot
from tests.plot._drawn import colour_bars, image_of, panels_of, rises, tick_texts, values_at

NORTH = torch.linspace(0, 100, 21, dtype=torch.float64)
TIME = torch.linspace(3, 13, 41, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def of(kernel, **hyperparameters):
    return kernel.double().initialize(**hyperparameters)


def two_axes(first=None, second=None, grid=None):
    first = of(RBFKernel(), lengthscale=12.0) if first is None else first
    second = of(MaternKernel(nu=1.5), lengthscale=0.8) if second is None else second
    return gaps.GappyGridKernel([first, second], grid or gaps.CartesianGrid([NORTH, TIME]))


def curves(ax):
    """Those drawn, without what marks places on them."""
    return [line for line in ax.lines if len(line.get_xdata()) > 2]


def marks(ax):
    return [tuple(line.get_xydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1]


def correlation(kernel, distances):
    """Evaluated directly."""
    distances = torch.as_tensor(distances, dtype=torch.float64)[:, None]
    with torch.no_grad():
        values = kernel(torch.zeros(1, 1, dtype=torch.float64), distances).to_dense()
    return (values / kernel(distances[:1]).to_dense().detach()).squeeze().numpy()


def test_curves_are_the_kernels_correlations():
    kernel = two_axes()
    figure = plot.kernels(ScaleKernel(kernel), names=["north", "time"])
    assert isinstance(figure, Figure)
    for ax, own, scale in zip(panels_of(figure), kernel.kernels, (12.0, 0.8), strict=True):
        (curve,) = curves(ax)
        assert curve.get_xdata()[0] == 0.0
        assert curve.get_ydata() == pytest.approx(correlation(own, curve.get_xdata()), abs=1e-9)
        ((place, height),) = marks(ax)
        assert place == pytest.approx(scale)
        assert height == pytest.approx(correlation(own, [0.0, scale])[1], abs=1e-4)
    first, second = panels_of(figure)
    assert first.get_title() == "north\nRBF, length-scale 12"
    assert second.get_title() == "time\nMatérn 3/2, length-scale 0.8"
    assert (first.get_xlabel(), first.get_ylabel()) == ("distance", "correlation")


def test_curves_end_where_correlations_have_faded():
    figure = plot.kernels(two_axes())
    first, second = (curves(ax)[0] for ax in panels_of(figure))
    for curve, extent in ((first, 100), (second, 10)):
        assert abs(curve.get_ydata()[-1]) < 0.02
        assert curve.get_xdata()[-1] < 0.5 * extent
    far = plot.kernels(two_axes(of(RBFKernel(), lengthscale=1e3)))
    assert curves(panels_of(far)[0])[0].get_xdata()[-1] == pytest.approx(100)  # no further than the axis reaches


@pytest.mark.parametrize(
    ("distance", "ends"), [(7.0, (7, 7)), (np.float32(7), (7, 7)), ([50, 2.5], (50, 2.5)), ([20.0, None], (20, None))]
)
def test_distances_may_be_told(distance, ends):
    panels = panels_of(plot.kernels(two_axes(), distance=distance))
    for ax, end in zip(panels, ends, strict=True):
        if end is not None:
            assert curves(ax)[0].get_xdata()[-1] == pytest.approx(end)


def test_periods_are_marked_and_repeat():
    seasonal = of(PeriodicKernel(), period_length=2.0, lengthscale=1.0)
    ax = panels_of(plot.kernels(two_axes(second=seasonal)))[1]
    (curve,) = curves(ax)
    assert curve.get_ydata() == pytest.approx(correlation(seasonal, curve.get_xdata()), abs=1e-9)
    assert marks(ax) == [pytest.approx((2.0, 1.0), abs=1e-3)]
    assert "period 2" in ax.get_title()
    assert "length-scale" not in ax.get_title()  # a periodic one is in no units of the axis


def test_a_sum_and_a_product_of_kernels_of_one_axis():
    decaying = of(PeriodicKernel(), period_length=2.0) * of(RBFKernel(), lengthscale=6.0)
    added = of(ScaleKernel(of(RBFKernel(), lengthscale=5.0)), outputscale=3.0) + of(
        MaternKernel(nu=0.5), lengthscale=40.0
    )
    first, second = panels_of(plot.kernels(two_axes(added, decaying)))
    for ax, kernel in ((first, added), (second, decaying)):
        (curve,) = curves(ax)
        assert curve.get_ydata() == pytest.approx(correlation(kernel, curve.get_xdata()), abs=1e-9)
    assert first.get_title() == "axis 0\nRBF + Matérn 1/2, length-scale 5, 40"
    assert second.get_title() == "axis 1\nPeriodic × RBF, length-scale 6, period 2"


def test_a_sum_has_a_line_for_each_term():
    terms = [two_axes(), two_axes(of(MaternKernel(nu=0.5), lengthscale=30.0), of(RBFKernel(), lengthscale=2.0))]
    figure = plot.kernels(ScaleKernel(terms[0]) + ScaleKernel(terms[1]))
    for i, ax in enumerate(panels_of(figure)):
        drawn = curves(ax)
        assert len(drawn) == 2
        for curve, term in zip(drawn, terms, strict=True):
            assert curve.get_ydata() == pytest.approx(correlation(term.kernels[i], curve.get_xdata()), abs=1e-9)
        assert len({curve.get_color() for curve in drawn}) == 2
    legend = [text.get_text() for text in panels_of(figure)[0].get_legend().get_texts()]
    assert legend == ["1: RBF", "2: Matérn 1/2"]


def test_a_product_of_grid_kernels_is_one_line():
    one, other = two_axes(), two_axes(of(MaternKernel(nu=0.5), lengthscale=30.0), of(RBFKernel(), lengthscale=2.0))
    figure = plot.kernels(one * ScaleKernel(other))
    for i, ax in enumerate(panels_of(figure)):
        (curve,) = curves(ax)
        expected = correlation(one.kernels[i], curve.get_xdata()) * correlation(other.kernels[i], curve.get_xdata())
        assert curve.get_ydata() == pytest.approx(expected, abs=1e-9)


def test_a_kernel_of_one_axis_is_constant_along_the_other():
    figure = plot.kernels(two_axes() + of(RBFKernel(active_dims=[1]), lengthscale=3.0))
    first, second = panels_of(figure)
    assert curves(first)[1].get_ydata() == pytest.approx(1.0)
    assert curves(second)[1].get_ydata() == pytest.approx(
        correlation(of(RBFKernel(), lengthscale=3.0), curves(second)[1].get_xdata()), abs=1e-9
    )


def test_outputs_are_a_matrix_of_correlations():
    index = IndexKernel(num_tasks=3, rank=2).double()
    grid = gaps.CartesianGrid([NORTH, torch.arange(3.0, dtype=torch.float64)])
    figure = plot.kernels(two_axes(second=index, grid=grid), names=["north", "output"])
    ax = panels_of(figure)[1]
    covariance = index.covar_matrix.to_dense().detach()
    deviation = covariance.diagonal().sqrt()
    expected = (covariance / torch.outer(deviation, deviation)).numpy()
    assert values_at(ax, range(3), range(3)) == pytest.approx(expected, abs=1e-6)
    assert image_of(ax).get_clim() == (-1.0, 1.0)
    assert not rises(ax)
    assert tick_texts(ax.xaxis) == ["0", "1", "2"]
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written == {(j, i): f"{value:.2f}" for (i, j), value in np.ndenumerate(expected)}
    assert len(colour_bars(figure)) == 1
    assert ax.get_title() == "output\nIndex"


def test_numbers_in_a_matrix_stand_in_their_cells():
    places = torch.tensor([4.5, 1.5, 2.5], dtype=torch.float64)
    linear = of(LinearKernel(), variance=1.0) + of(RBFKernel(), lengthscale=1.0)
    grid = gaps.CartesianGrid([NORTH, places])
    ax = panels_of(plot.kernels(two_axes(second=linear, grid=grid)))[1]
    covariance = linear(places[:, None]).to_dense().detach()
    deviation = covariance.diagonal().sqrt()
    expected = (covariance / torch.outer(deviation, deviation)).numpy()
    assert values_at(ax, places.numpy(), places.numpy()) == pytest.approx(expected, abs=1e-6)
    assert len(ax.texts) == 9
    for text in ax.texts:
        assert text.get_text() == f"{values_at(ax, [text.get_position()[0]], [text.get_position()[1]]).item():.2f}"


def test_places_without_variance_have_no_correlation():
    ax = panels_of(plot.kernels(two_axes(of(LinearKernel(), variance=2.0))))[0]
    shown = values_at(ax, [0.0, 50.0], [0.0, 50.0])
    assert np.isnan(shown).tolist() == [[True, True], [True, False]]
    assert shown[1, 1] == pytest.approx(1.0)


def test_terms_that_are_not_stationary_have_a_matrix_beside_the_lines():
    figure = plot.kernels(two_axes() + LinearKernel(active_dims=[0]).double())
    lines, matrix, along_time = panels_of(figure)
    assert len(curves(lines)) == 1
    assert image_of(matrix).get_clim() == (-1.0, 1.0)
    assert matrix.get_title().startswith("axis 0, term 2\nLinear")
    assert len(curves(along_time)) == 2


def test_columns_of_an_axis_are_drawn_in_turn():
    places = torch.rand(30, 2, dtype=torch.float64) * torch.tensor([10.0, 500.0])
    space = of(RBFKernel(ard_num_dims=2), lengthscale=torch.tensor([2.0, 50.0], dtype=torch.float64))
    grid = gaps.CartesianGrid([places, TIME])
    ax = panels_of(plot.kernels(two_axes(space, grid=grid)))[0]
    extent = (places.amax(0) - places.amin(0)).tolist()
    drawn = curves(ax)
    assert [curve.get_label() for curve in drawn] == ["column 0", "column 1"]
    for curve, size, scale in zip(drawn, extent, (2.0, 50.0), strict=True):
        distance = curve.get_xdata() * size
        assert curve.get_ydata() == pytest.approx(np.exp(-0.5 * (distance / scale) ** 2), abs=1e-9)
    assert ax.get_xlabel() == "distance / extent of the column"
    assert "length-scale 2, 50" in ax.get_title()


def test_an_axis_of_one_place():
    grid = gaps.CartesianGrid([NORTH[:1], TIME])
    lines = panels_of(plot.kernels(two_axes(grid=grid)))[0]
    assert curves(lines)[0].get_xdata()[-1] == pytest.approx(1.0)
    other = panels_of(plot.kernels(two_axes(of(LinearKernel(), variance=1.0), grid=grid)))[0]
    assert not curves(other)  # linear, wherever it is looked at


def test_of_a_batch_the_first():
    batch = torch.Size([2])
    scales = torch.tensor([[[12.0]], [[30.0]]], dtype=torch.float64)
    kernels = [of(RBFKernel(batch_shape=batch), lengthscale=scales) for _ in range(2)]
    ax = panels_of(plot.kernels(two_axes(*kernels)))[0]
    assert [place for place, _ in marks(ax)] == pytest.approx([12.0])
    (curve,) = curves(ax)
    expected = correlation(of(RBFKernel(), lengthscale=12.0), curve.get_xdata())
    assert curve.get_ydata() == pytest.approx(expected, abs=1e-9)


def test_float32_is_found_stationary():
    grid = gaps.CartesianGrid([NORTH.float() + 2000, TIME.float()])
    kernel = gaps.GappyGridKernel([RBFKernel().initialize(lengthscale=12.0), MaternKernel()], grid)
    assert [len(curves(ax)) for ax in panels_of(plot.kernels(kernel))] == [1, 1]


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_a_trained_model_is_drawn_as_learned_and_left_as_it_was():
    values = torch.sin(NORTH / 15)[:, None] * torch.cos(TIME) + 0.1 * torch.randn(21, 41, dtype=torch.float64)
    values[3:8, 4:20] = torch.nan
    grid, x, y = gaps.from_array(values, [NORTH, TIME])
    model = Model(x, y, ScaleKernel(two_axes(grid=grid))).double()
    gaps.fit(model, steps=3, progress=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = model.training
    figure = plot.kernels(model)
    learned = [kernel.lengthscale.item() for kernel in model.covar_module.base_kernel.kernels]
    assert learned != [12.0, 0.8]
    assert [marks(ax)[0][0] for ax in panels_of(figure)] == pytest.approx(learned)
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_columns_of_the_inputs_that_are_on_no_grid_are_left_out():
    kernel = gaps.GappyGridKernel(
        [of(RBFKernel(), lengthscale=12.0), of(RBFKernel(), lengthscale=0.8)], gaps.CartesianGrid([NORTH, TIME]),
        active_dims=[0, 1],
    )  # fmt: skip
    figure = plot.kernels(kernel + of(RBFKernel(active_dims=[2]), lengthscale=5.0))
    assert [len(curves(ax)) for ax in panels_of(figure)] == [1, 1]


def test_more_axes_than_fit_into_a_row():
    axis = torch.linspace(0, 1, 3)
    kernel = gaps.GappyGridKernel([RBFKernel() for _ in range(5)], gaps.CartesianGrid([axis] * 5))
    panels = panels_of(plot.kernels(kernel))
    assert [ax.get_title().partition("\n")[0] for ax in panels] == [f"axis {i}" for i in range(5)]
    assert panels[4].get_position().y1 < panels[0].get_position().y0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (RBFKernel(), {}, "model: got RBFKernel without a GappyGridKernel"),
        (3, {}, "model: got int without a GappyGridKernel"),
        (None, {"names": ["one"]}, "names: got 1; expected 2"),
        (None, {"distance": -1.0}, "distance: got -1.0; expected a positive number"),
        (None, {"distance": np.inf}, "distance: got inf"),
        (None, {"distance": [1.0]}, r"distance: got \[1.0\]; expected a positive number, or one for each of 2 axes"),
    ],
)
def test_errors_name_the_argument_and_leave_no_figure(model, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plot.kernels(two_axes() if model is None else model, **options)
    assert not plt.get_fignums()


def test_terms_on_different_grids_are_refused():
    other = two_axes(grid=gaps.CartesianGrid([NORTH, TIME + 1]))
    with pytest.raises(ValueError, match=r"^model: got terms on the grids .* expected one grid"):
        plot.kernels(two_axes() + other)
    assert not plt.get_fignums()


def test_a_legend_covers_no_curve():
    figure = plot.kernels(two_axes() + two_axes(second=of(PeriodicKernel(), period_length=2.0)))
    figure.draw_without_rendering()
    for ax in panels_of(figure):
        legend = ax.get_legend().get_window_extent()
        assert not legend.overlaps(ax.get_window_extent())
        assert not legend.overlaps(ax.xaxis.get_tightbbox())
        assert figure.bbox.y0 <= legend.y0


def test_a_kernel_of_a_block_is_shown_along_each_of_its_axes():
    from gpytorch_gaps.plot.kernel_terms import kernel_terms

    grid = gaps.CartesianGrid([range(5), range(4), range(3)])
    place, time = MaternKernel(nu=0.5, ard_num_dims=2), RBFKernel()
    place.lengthscale, time.lengthscale = torch.tensor([2.0, 3.0]), 4.0
    _, ((first, second, third),) = kernel_terms(gaps.GappyGridKernel([place, time], grid, blocks=[(0, 1), (2,)]))
    assert [own.length_scales for own in (first, second, third)] == [pytest.approx([x]) for x in (2.0, 3.0, 4.0)]
    lags = torch.tensor([[0.0], [1.0], [2.0]])
    np.testing.assert_allclose(second.correlation(torch.zeros(1), lags), np.exp(-np.arange(3) / 3.0), rtol=1e-6)
