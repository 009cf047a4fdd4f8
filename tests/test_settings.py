"""Settings: checked when they are made, restored when they are left, and never looser than asked."""

import linear_operator
import pytest

from gpytorch_gaps import settings

DEFAULTS = {
    "gap_method": "auto",
    "logdet_method": "auto",
    "variance_method": "auto",
    "variance_samples": 64,
    "preconditioner": "auto",
    "num_neighbours": None,
    "preconditioner_rank": None,
    "solve_tolerance": None,
    "mean_tolerance": None,
    "train_tolerance": 1e-6,
    "max_iterations": 2000,
    "gap_penalty": None,
}
GOOD = {
    "gap_method": ["auto", "fill", "ignore", "penalize", "cholesky"],
    "logdet_method": ["auto", "exact", "stochastic", "nystrom"],
    "variance_method": ["auto", "exact", "low_rank", "pathwise"],
    "variance_samples": [8, 64, 10**5],
    "preconditioner": ["auto", "eigen", "neighbours", "none", len],
    "num_neighbours": [None, 1, 30],
    "preconditioner_rank": [None, 0, 1, 500],
    "solve_tolerance": [1e-12, 0.5, 1, None],
    "mean_tolerance": [1e-12, 0.5, 1, None],
    "train_tolerance": [1e-12, 0.5, 1],
    "max_iterations": [1, 10**6],
    "gap_penalty": [None, 1e-3, 10, 1e9],
}
NOT_TOLERANCES = [0, 0.0, -1e-6, float("nan"), float("inf"), None, "1e-6", True, [1e-6], 1j]
BAD = {
    "gap_method": ["", "Fill", "fil", None, 1, ["fill"], ("fill",), b"fill"],
    "logdet_method": ["", "EXACT", "cholesky", None, 0],
    "variance_method": ["", "Exact", "low rank", "lowrank", "samples", None, 1, ["exact"]],
    "variance_samples": [7, 1, 0, -64, 64.0, None, "64", True, float("nan"), float("inf"), [64]],
    "preconditioner": ["", "Eigen", "neighbors", "vecchia", None, 0, ["eigen"], ("eigen",), b"eigen"],
    "num_neighbours": [0, -1, 20.0, 0.5, "20", True, float("nan"), float("inf"), [20]],
    "preconditioner_rank": [-1, 2.0, 0.5, "10", True, float("nan"), [3]],
    "solve_tolerance": [value for value in NOT_TOLERANCES if value is not None],
    "mean_tolerance": [value for value in NOT_TOLERANCES if value is not None],
    "train_tolerance": NOT_TOLERANCES,
    "max_iterations": [0, -5, 10.0, None, "100", False, float("inf")],
    "gap_penalty": [0, 0.0, -1.0, float("nan"), float("inf"), "10", True],
}
EVERY_GOOD = [(name, value) for name, values in GOOD.items() for value in values]
EVERY_BAD = [(name, value) for name, values in BAD.items() for value in values]


@pytest.fixture(autouse=True)
def restored():
    """Whatever a failing test leaves behind, the next one starts from the defaults."""
    yield
    for name, value in DEFAULTS.items():
        getattr(settings, name)._set_value(value)


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_those_documented(name, value):
    assert getattr(settings, name).value() == value


def test_every_setting_is_covered_here():
    assert set(DEFAULTS) == set(GOOD) == set(BAD)
    assert set(settings.__all__) >= set(DEFAULTS)


@pytest.mark.parametrize(("name", "value"), EVERY_GOOD)
def test_a_value_holds_inside_and_not_after(name, value):
    context = getattr(settings, name)
    before = context.value()
    with context(value):
        assert context.value() == value
    assert context.value() == before == DEFAULTS[name]


@pytest.mark.parametrize(("name", "value"), EVERY_BAD)
def test_a_bad_value_fails_where_it_is_made_and_names_the_setting(name, value):
    context = getattr(settings, name)
    with pytest.raises(ValueError, match=rf"settings\.{name}: got .*, expected ") as caught:
        context(value)
    assert repr(value) in str(caught.value)
    assert context.value() == DEFAULTS[name]


def test_a_choice_lists_what_may_be_chosen():
    with pytest.raises(ValueError, match="auto, fill, ignore, penalize, spectral, cholesky"):
        settings.gap_method("filled")


@pytest.mark.parametrize(("name", "values"), GOOD.items())
def test_an_exception_restores(name, values):
    context = getattr(settings, name)

    def broken():
        with context(values[-1]):
            assert context.value() == values[-1]
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert context.value() == DEFAULTS[name]


def test_a_bad_inner_value_leaves_the_outer_one():
    with settings.gap_method("fill"):
        with pytest.raises(ValueError, match="gap_method"), settings.gap_method("nothing"):
            pass
        assert settings.gap_method.value() == "fill"


def test_nested_contexts_restore_what_was_before():
    with settings.gap_method("fill"), settings.preconditioner_rank(5):
        with settings.gap_method("ignore"):
            assert (settings.gap_method.value(), settings.preconditioner_rank.value()) == ("ignore", 5)
            with settings.gap_method("fill"):
                assert settings.gap_method.value() == "fill"
            assert settings.gap_method.value() == "ignore"
        assert settings.gap_method.value() == "fill"
    assert (settings.gap_method.value(), settings.preconditioner_rank.value()) == ("auto", None)


def test_a_context_made_earlier_restores_what_it_found_on_entry():
    prepared = settings.gap_method("fill")
    with settings.gap_method("ignore"):
        with prepared:
            assert settings.gap_method.value() == "fill"
        assert settings.gap_method.value() == "ignore"
    assert settings.gap_method.value() == "auto"


def test_settings_do_not_touch_each_other():
    with settings.solve_tolerance(1e-3):
        assert settings.train_tolerance.value() == 1e-6
    with settings.gap_method("ignore"):
        assert settings.logdet_method.value() == "auto"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [(1e-4, 1.0, 1e-4), (1e-4, 1e-8, 1e-8), (1e-8, 1e-4, 1e-8), (1e-5, 1e-5, 1e-5)]
)
@pytest.mark.parametrize("training", [False, True])
def test_the_tighter_tolerance_counts(ours, theirs, expected, training):
    mine = settings.train_tolerance if training else settings.solve_tolerance
    with mine(ours), linear_operator.settings.cg_tolerance(theirs):
        config = settings.current()
        assert (config.for_training() if training else config).tolerance == expected


def test_training_and_solving_have_their_own_tolerance():
    with settings.solve_tolerance(1e-9), settings.train_tolerance(1e-3):
        assert settings.current().tolerance == 1e-9
        assert settings.current().train_tolerance == 1e-3


def test_upstreams_default_loosens_nothing():
    assert settings.current().tolerance == 1e-6
    assert settings.current().train_tolerance == 1e-6


def test_means_are_certified_unless_only_a_residual_is_asked_for():
    assert (settings.current().tolerance, settings.current().mean_tolerance) == (1e-6, 1e-2)
    with settings.solve_tolerance(1e-3):
        assert (settings.current().tolerance, settings.current().mean_tolerance) == (1e-3, None)
        with settings.mean_tolerance(1e-4):
            assert settings.current().mean_tolerance == 1e-4
    with settings.mean_tolerance(0.1):
        assert (settings.current().tolerance, settings.current().mean_tolerance) == (1e-6, 0.1)
