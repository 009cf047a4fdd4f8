"""Solves made long after a posterior reach those who asked, once; and bars, for those who do not mind them."""

import gc
import weakref
from contextlib import ExitStack

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.reports import _recorders, also_record_to
from gpytorch_gaps.utils import progress
from tests.workflow._pairs import CASES, Model, gappy, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert _recorders == []
    assert settings.progress.value()


def make():
    grid, x, y = gaps.from_array(*reversed(gappy((14, 11), 0.4, 0)))
    kernel = gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.5)], grid)
    model = Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(kernel)).double()
    model.likelihood.noise = 0.05
    return model.eval(), grid


def posterior_of(model, x):
    """Its mean solved for, its covariance not."""
    with torch.no_grad(), settings.gap_method("ignore"), MAX_CHOLESKY(0):
        posterior = model(x)
        posterior.mean  # noqa: B018
    return posterior


# what is asked of a posterior later, and whether that is a report of variances
LATER = {
    "variance": (lambda model, posterior: posterior.variance, 1),
    "stddev": (lambda model, posterior: posterior.stddev, 1),
    "noisy variance": (lambda model, posterior: model.likelihood(posterior).variance, 1),
    "covariance": (lambda model, posterior: posterior.covariance_matrix, 0),
    "a few samples": (lambda model, posterior: posterior.rsample(torch.Size([2])), 0),
    "many samples": (lambda model, posterior: posterior.rsample(torch.Size([500])), 0),
    "noisy samples": (lambda model, posterior: model.likelihood(posterior).rsample(torch.Size([2])), 0),
    "a product": (lambda model, posterior: posterior.lazy_covariance_matrix @ torch.ones(154).double(), 0),
    "a part": (lambda model, posterior: posterior[3:9].variance, 1),
}
later = pytest.mark.parametrize("what", LATER)


def ask(what, model, posterior):
    with torch.no_grad():
        LATER[what][0](model, posterior)


def identities(reports):
    return [id(report) for report in reports]


# -- records -----------------------------------------------------------------------------------------------------------


@later
def test_the_record_of_the_making_gets_them(what):
    """And one that is active by then, too; one that has ended does not."""
    model, grid = make()
    with gaps.record_solves() as stranger:
        pass
    with gaps.record_solves() as then:
        posterior = posterior_of(model, grid.points())
    made = len(then)
    assert made == 1
    assert then.variances == []
    with gaps.record_solves() as now:
        ask(what, model, posterior)
    assert identities(then[made:]) == identities(now) != []
    assert len(set(identities(then))) == len(then)
    assert all(report.method == "ignore" for report in now)
    assert identities(then.variances) == identities(now.variances)
    assert len(now.variances) == LATER[what][1]
    assert len(stranger) == len(stranger.variances) == 0


@later
def test_a_record_that_is_still_active_gets_them_once(what):
    model, grid = make()
    with gaps.record_solves() as then:
        posterior = posterior_of(model, grid.points())
        made = len(then)
        with gaps.record_solves() as inner:
            ask(what, model, posterior)
    assert identities(then[made:]) == identities(inner) != []
    assert identities(then.variances) == identities(inner.variances)


@later
def test_a_record_that_is_active_again_gets_them_once(what):
    model, grid = make()
    with gaps.record_solves() as then:
        posterior = posterior_of(model, grid.points())
    made = len(then)
    with also_record_to([then]), also_record_to([then, then]):
        ask(what, model, posterior)
    assert len(then) > made
    assert len(set(identities(then))) == len(then)
    assert len(set(identities(then.variances))) == len(then.variances) == LATER[what][1]


@later
def test_without_a_record_then(what):
    model, grid = make()
    posterior = posterior_of(model, grid.points())
    with gaps.record_solves() as now:
        ask(what, model, posterior)
    assert len(now) == len(set(identities(now))) > 0
    with gaps.record_solves() as after:
        pass
    assert len(after) == 0


def test_several_records_of_the_making():
    """All of them, whether they have ended or not."""
    model, grid = make()
    with gaps.record_solves() as outer:
        with gaps.record_solves() as inner:
            posterior = posterior_of(model, grid.points())
        ask("variance", model, posterior)
        assert identities(outer) == identities(inner)
        assert len(outer) == 2
    ask("covariance", model, posterior)
    assert identities(outer) == identities(inner)
    assert len(outer) == 3


def test_what_was_solved_before_is_not_told_again():
    model, grid = make()
    with gaps.record_solves() as then:
        posterior = posterior_of(model, grid.points())
        ask("variance", model, posterior)
    count = len(then)
    ask("variance", model, posterior)
    ask("noisy variance", model, posterior)
    assert len(then) == count
    assert len(then.variances) == 1


def test_the_next_posterior_is_not_told_to_the_last_record():
    """The model keeps its solutions, not who was listening."""
    model, grid = make()
    with gaps.record_solves() as then:
        posterior_of(model, grid.points())
    made = len(then)
    other = posterior_of(model, grid.points())
    ask("variance", model, other)
    model.set_train_data(targets=model.train_targets + 1.0)
    ask("variance", model, posterior_of(model, grid.points()))
    assert len(then) == made
    assert then.variances == []


@pytest.mark.parametrize("what", ["mean", "variance", "sample"])
@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels"])
def test_backward_passes_tell_both_records(case, what):
    """Run later, they tell the record of the forward pass, and one that is active by then."""
    model = CASES[case](small=True).ours.eval()
    x = CASES[case](small=True).test_x[:5]
    with (
        gpytorch.settings.detach_test_caches(False),
        settings.gap_method("ignore"),
        MAX_CHOLESKY(0),
        gaps.record_solves() as then,
    ):
        posterior = model(x)
        value = posterior.rsample(torch.Size([1])) if what == "sample" else getattr(posterior, what)
    made = len(then)
    assert made > 0
    with gaps.record_solves() as now:
        value.sum().backward()
    assert identities(then[made:]) == identities(now)
    assert all(report.converged and report.method == "ignore" for report in now)
    if what == "mean":
        assert len(now) == 1
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_a_backward_pass_inside_the_block_is_told_once():
    model, grid = make()
    with gpytorch.settings.detach_test_caches(False), MAX_CHOLESKY(0), gaps.record_solves() as then:
        model(grid.points()[:5]).mean.sum().backward()
    assert len(then) == len(set(identities(then))) == 2


def test_a_failure_ends_the_resumed_record():
    with gaps.record_solves() as then:
        config = settings.current()

    def broken():
        with also_record_to(config.records):
            assert [record is then for record in _recorders] == [True]
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert _recorders == []


def test_a_model_does_not_keep_records_alive():
    model, grid = make()
    with gaps.record_solves() as then:
        posterior_of(model, grid.points())
    watch = weakref.ref(then)
    del then
    gc.collect()
    assert watch() is None


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_snapshots_compare_by_their_values():
    plain = settings.current()
    with gaps.record_solves() as record:
        recorded = settings.current()
    assert recorded.records == (record,)
    assert plain.records == ()
    assert plain == recorded
    assert hash(plain) == hash(recorded)
    assert {plain: 1}[recorded] == 1
    assert "records" not in repr(recorded)
    with settings.gap_method("fill"):
        assert settings.current() != plain
    with MAX_CHOLESKY(17):
        assert settings.current() != plain


def test_the_key_of_a_solve():
    """What its solution depends on, and nothing else."""
    plain = settings.current().solution_key
    with gaps.record_solves(), settings.variance_samples(17), settings.logdet_method("exact"):
        assert settings.current().solution_key == plain
    for context in (
        settings.gap_method("fill"),
        settings.preconditioner_rank(3),
        settings.solve_tolerance(1e-7),
        settings.max_iterations(7),
        settings.gap_penalty(2.0),
        MAX_CHOLESKY(17),
        linear_operator.settings.cg_tolerance(1e-8),
    ):
        with context:
            assert settings.current().solution_key != plain
    assert settings.current().solution_key == plain


def test_every_setting_has_its_own_value_of_a_configuration():
    """And a configuration does not change with the settings."""
    contexts = {
        "method": settings.gap_method("fill"),
        "logdet_method": settings.logdet_method("stochastic"),
        "variance_method": settings.variance_method("pathwise"),
        "variance_samples": settings.variance_samples(11),
        "rank": settings.preconditioner_rank(12),
        "tolerance": settings.solve_tolerance(1e-3),
        "train_tolerance": settings.train_tolerance(1e-4),
        "mean_tolerance": settings.mean_tolerance(0.5),
        "max_iterations": settings.max_iterations(13),
        "penalty": settings.gap_penalty(14.0),
        "memory": settings.prediction_memory(15),
        "dense_size": settings.dense_size(16),
        "mixed_precision": settings.mixed_precision(),
        "num_probes": linear_operator.settings.num_trace_samples(17),
    }
    before = settings.current()
    with ExitStack() as stack:
        expected = {name: stack.enter_context(context) or type(context).value() for name, context in contexts.items()}
        config = settings.current()
    assert {name: getattr(config, name) for name in contexts} == expected
    assert all(getattr(config, name) != getattr(before, name) for name in contexts)
    assert settings.current() == before != config


@pytest.mark.parametrize("late", [{"gap_method": "cholesky"}, {"solve_tolerance": 0.5}, {"max_iterations": 1}])
def test_later_solves_follow_the_settings_of_the_prediction(late):
    """Whatever the settings are when the variance is read."""
    found = []
    for changed in ({}, late):
        model, grid = make()
        with MAX_CHOLESKY(0), settings.gap_method("fill"), settings.solve_tolerance(1e-9), torch.no_grad():
            posterior = model(grid.points())
        with ExitStack() as stack, gaps.record_solves() as record, torch.no_grad():
            for name, value in changed.items():
                stack.enter_context(getattr(settings, name)(value))
            found.append((posterior.mean, posterior.variance))
        assert {(report.method, report.tolerance) for report in record} == {("fill", 1e-9)}
        assert all(report.converged for report in record)
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


# -- bars --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Bars at once."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)


def alone():
    """A model with an observation that leave_out must solve for."""
    model, _ = make()
    model.likelihood = gaps.GappyGridLikelihood(1e-4).double()
    model.covar_module.base_kernel.kernels[0].lengthscale = 0.001
    return model


def exact_variance(**_):
    model, grid = make()
    with torch.no_grad(), settings.gap_method("ignore"):
        model(grid.points()).variance  # noqa: B018


def variance_by(method, off=0.0):
    def run(**_):
        model, grid = make()
        with torch.no_grad(), settings.variance_method(method):
            model(grid.points() + off).variance  # noqa: B018

    return run


def samples(**kwargs):
    model, grid = make()
    with torch.no_grad():
        gaps.sample_posterior(model, grid, 2, **kwargs)


def ordinary_samples(**_):
    model, grid = make()
    with torch.no_grad():
        model(grid.points()).rsample(torch.Size([2]))


def groups_left_out(**kwargs):
    model, _ = make()
    gaps.leave_out(model, torch.arange(len(model.train_targets)) // 9, **kwargs)


def left_out(**kwargs):
    gaps.leave_out(alone(), **kwargs)


def left_out_from_samples(**kwargs):
    with settings.variance_method("pathwise"):
        gaps.leave_out(alone(), **kwargs)


BARS = {
    "exact variances": exact_variance,
    "variances by eigenvectors": variance_by("low_rank"),
    "variances from samples": variance_by("pathwise", off=0.1),  # at cells neighbours would do without draws
    "samples": samples,
    "groups left out": groups_left_out,
    "observations left out": left_out,
    "leaving out, from samples": left_out_from_samples,
}
WITH_AN_ARGUMENT = ["samples", "groups left out", "observations left out", "leaving out, from samples"]


@pytest.mark.parametrize("name", BARS)
def test_bars_show_after_a_while(name, impatient, capsys):
    BARS[name]()
    captured = capsys.readouterr()
    assert f"{name}: " in captured.err
    assert captured.out == ""


def test_a_bar_counts_draws(impatient, capsys):
    ordinary_samples()
    assert "samples: " in (shown := capsys.readouterr().err)
    assert "/2 [" in shown


@pytest.mark.parametrize("name", BARS)
def test_bars_are_silenced_by_the_setting(name, impatient, capsys):
    with settings.progress(False):
        BARS[name]()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", WITH_AN_ARGUMENT)
def test_bars_are_silenced_by_the_argument(name, impatient, capsys):
    BARS[name](progress=False)
    assert capsys.readouterr().err == ""
    assert settings.progress.value()
    BARS[name](progress=True)
    assert f"{name}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_AN_ARGUMENT)
def test_the_argument_does_not_overrule_the_setting(name, impatient, capsys):
    with settings.progress(False):
        BARS[name](progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", BARS)
def test_what_is_quick_shows_nothing(name, capsys):
    BARS[name]()
    assert capsys.readouterr().err == ""


def test_the_setting_counts_where_the_work_is_done(impatient, capsys):
    """The setting at the time of the work counts, not that at the creation of the posterior."""
    model, grid = make()
    with settings.progress(False):
        posterior = posterior_of(model, grid.points())
    ask("variance", model, posterior)
    assert "exact variances: " in capsys.readouterr().err
    posterior = posterior_of(model, grid.points())
    with settings.progress(False):
        ask("variance", model, posterior)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", [0, 1, None, "no", 0.0])
def test_a_value_of_progress_that_is_refused(value):
    with pytest.raises(ValueError, match=r"settings\.progress: got .*, expected True or False"):
        settings.progress(value)


def test_progress_is_restored():
    with settings.progress(False):
        assert not settings.progress.value()
        with settings.progress():
            assert settings.progress.value()
        assert not settings.progress.value()
    assert settings.progress.value()
