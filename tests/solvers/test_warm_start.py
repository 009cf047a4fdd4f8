"""What one training step hands to the next, against dense float64: probes, the path, and reused preconditioners."""

import math

import pytest
import torch

from gpytorch_gaps import WarmStart, settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.warm_start import BIAS, LONGEST_STEP, MOVED, REDUCTION, LogdetPath, unbiased_tolerances
from tests import _dense as dense
from tests._dense import solve_system

LIKE = torch.zeros((), dtype=torch.float64)

# -- probes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_probes_are_signs_the_same_whenever_asked(dtype):
    like = torch.zeros((), dtype=dtype)
    memory, before = WarmStart(num_probes=5), torch.get_rng_state()
    probes = memory.probes(4000, like)
    assert probes.shape == (4000, 5)
    assert probes.dtype == dtype
    assert torch.equal(probes.abs(), torch.ones_like(probes))
    assert torch.equal(probes, memory.probes(4000, like))
    assert torch.equal(probes, WarmStart(num_probes=5).probes(4000, like))
    assert torch.equal(torch.get_rng_state(), before)
    # neither constant, nor alike: five standard deviations of means of independent signs
    assert float(probes.mean(0).abs().max()) < 5 / 4000**0.5
    assert float((probes.mT @ probes / 4000 - torch.eye(5, dtype=dtype)).abs().max()) < 5 / 4000**0.5
    assert probes.mT.is_contiguous()


def test_another_seed_is_another_draw_and_more_probes_begin_with_the_same():
    first = WarmStart(num_probes=3).probes(100, LIKE)
    assert not torch.equal(first, WarmStart(num_probes=3, seed=1).probes(100, LIKE))
    assert torch.equal(first, WarmStart(num_probes=6).probes(100, LIKE)[:, :3])


# -- the path ----------------------------------------------------------------------------------------------------------


def a_path(matrix, rhs, probes, start=0.0, error=0.0):
    solutions = torch.linalg.solve(matrix, torch.cat([rhs, probes], -1))
    zeros = torch.zeros_like(probes[0])
    return LogdetPath(cells_of(rhs), solutions, matrix @ probes, torch.tensor(start), torch.tensor(error), zeros)


def cells_of(rhs):
    """Every third cell of a grid: as many as there are rows."""
    return 3 * torch.arange(len(rhs))


def test_value_and_standard_error():
    followed = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    path = LogdetPath(LIKE, LIKE, LIKE, torch.tensor(10.0), torch.tensor(3.0), followed)
    assert float(path.value) == pytest.approx(13.0)
    # mean 3; squares of the deviations 4 + 1 + 9, over n - 1, over n
    assert float(path.standard_error) == pytest.approx(math.hypot(3.0, math.sqrt(14.0 / 2.0 / 3.0)))


def test_one_probe_knows_no_spread_and_states_the_whole_change():
    path = LogdetPath(LIKE, LIKE, LIKE, torch.tensor(10.0), torch.tensor(3.0), torch.tensor([-4.0]))
    assert float(path.standard_error) == pytest.approx(5.0)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_step_is_the_trapezoidal_rule(columns):
    rows, memory = 40, WarmStart(num_probes=3)
    before = dense.random_psd(rows, floor=0.5)
    after = before + 0.02 * dense.random_psd(rows, seed=1)
    rhs, probes = dense.randn(rows, columns), memory.probes(rows, LIKE)
    assert memory.advance(cells_of(rhs), torch.zeros(rows, columns + 3), probes) is None  # nothing to follow yet
    memory.keep(a_path(before, rhs, probes, start=7.0, error=0.25))
    new = a_path(after, rhs, probes)
    path = memory.advance(cells_of(rhs), new.solutions, new.images)
    first, second = torch.linalg.inv(before), torch.linalg.inv(after)
    expected = 0.5 * (probes.mT @ (first @ after - second @ before) @ probes).diagonal()
    torch.testing.assert_close(path.followed, expected, rtol=1e-10, atol=1e-10)
    assert float(path.value) == pytest.approx(7.0 + float(expected.mean()), rel=1e-12)
    assert float(path.start_error) == 0.25
    assert path.solutions is new.solutions
    memory.keep(path)
    # back again: the rule is odd
    old = a_path(before, rhs, probes)
    assert float(memory.advance(cells_of(rhs), old.solutions, old.images).value) == pytest.approx(7.0, rel=1e-12)


@pytest.mark.parametrize("log_change", [-0.99 * LONGEST_STEP, -0.01, 0.03, 0.99 * LONGEST_STEP])
def test_a_multiple_is_followed_by_its_hyperbolic_sine(log_change):
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    memory.keep(a_path(matrix, rhs, probes))
    new = a_path(math.exp(log_change) * matrix, rhs, probes)
    path = memory.advance(cells_of(rhs), new.solutions, new.images)
    torch.testing.assert_close(path.followed, torch.full_like(path.followed, rows * math.sinh(log_change)))
    assert abs(float(path.value) / (rows * log_change) - 1.0) < 1.01 * LONGEST_STEP**2 / 6.0


def test_loose_solves_let_the_value_drift_no_further_than_their_share_of_the_step():
    rows, loose, memory = 60, 0.1, WarmStart(num_probes=3)
    matrix, rhs, probes = dense.random_psd(rows, floor=0.5), dense.randn(rows, 1), memory.probes(rows, LIKE)
    exact = [a_path(math.exp(0.01 * step) * matrix, rhs, probes) for step in range(6)]
    for step, path in enumerate(exact):
        path.solutions = path.solutions * (1.0 + loose * (-1) ** step)  # as far off as a residual of a tenth
        memory.keep(path if step == 0 else memory.advance(cells_of(rhs), path.solutions, path.images))
    found = float(memory._paths[rows].value)
    assert abs(found - 0.05 * rows) < loose * 0.05 * rows


@pytest.mark.parametrize("log_change", [-1.01 * LONGEST_STEP, 1.01 * LONGEST_STEP, 3.0])
def test_a_step_too_long_is_not_followed(log_change):
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    memory.keep(a_path(matrix, rhs, probes))
    new = a_path(math.exp(log_change) * matrix, rhs, probes)
    assert memory.advance(cells_of(rhs), new.solutions, new.images) is None


def test_a_step_that_is_not_a_number_is_not_followed():
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    memory.keep(a_path(matrix, rhs, probes))
    new = a_path(matrix, rhs, probes)
    assert memory.advance(cells_of(rhs), new.solutions, new.images) is not None
    assert memory.advance(cells_of(rhs), new.solutions, torch.full_like(new.images, torch.nan)) is None


def test_guesses_are_of_the_same_shape_and_precision():
    rows, memory = 30, WarmStart(num_probes=2)
    rhs, probes = dense.randn(rows, 1), memory.probes(rows, LIKE)
    cells = cells_of(rhs)
    assert memory.guess(cells, rhs) is None
    path = a_path(dense.random_psd(rows), rhs, probes)
    memory.keep(path)
    assert memory.guess(cells, rhs) is path.solutions  # equal cells, in a tensor of their own
    assert memory.guess(path.cells, rhs) is path.solutions
    assert memory.guess(cells, rhs.float()) is None
    assert memory.guess(cells, dense.randn(rows, 2)) is None
    more = dense.randn(rows + 1, 1)
    assert memory.guess(cells_of(more), more) is None


@pytest.mark.parametrize("which", [0, 29])
def test_other_cells_have_neither_a_guess_nor_a_path(which):
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    path = a_path(matrix, rhs, probes)
    memory.keep(path)
    elsewhere = cells_of(rhs)
    elsewhere[which] += 1
    assert memory.guess(elsewhere, rhs) is None
    assert memory.advance(elsewhere, path.solutions, path.images) is None
    assert memory.guess(cells_of(rhs), rhs) is path.solutions
    assert memory.advance(cells_of(rhs), path.solutions, path.images).cells.tolist() == cells_of(rhs).tolist()


def test_forget_starts_anew():
    memory, system = WarmStart(num_probes=2), a_system()
    rhs, probes = dense.randn(system.num_train, 1), memory.probes(system.num_train, LIKE)
    memory.keep(a_path(system.dense(), rhs, probes))
    with memory.reuse_preconditioner(system, KEY):
        solve(system, rhs)
    memory.forget()
    assert memory.guess(cells_of(rhs), rhs) is None
    assert memory.advance(cells_of(rhs), torch.zeros(system.num_train, 3), probes) is None
    assert reused_by(memory, a_system()) is None


# -- tolerance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loosest", [0.1, 0.5])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-8])
def test_a_step_aims_at_a_share_of_what_it_begins_with(tolerance, loosest):
    memory = WarmStart(tolerance=tolerance, loosest=loosest)
    cases = {
        5.0: loosest,
        0.99 * loosest / REDUCTION: 0.99 * loosest,
        1.01 * loosest / REDUCTION: loosest,
        1.01 * tolerance / REDUCTION: 1.01 * tolerance,
        0.99 * tolerance / REDUCTION: tolerance,
        0.0: tolerance,
    }
    for start, expected in cases.items():
        assert memory.tolerance_for(tolerance, start) == pytest.approx(expected)
    assert memory.tolerance_for(tolerance) == tolerance  # from zero: as far as a solve goes
    with memory.settling():  # whether they move or not
        assert memory.tolerance_for(tolerance, 5.0) == tolerance
    assert memory.tolerance_for(tolerance, 5.0) == loosest

    def interrupted():
        with memory.settling():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert memory.tolerance_for(tolerance, 5.0) == loosest


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.3])
def test_solves_that_leave_the_unbiased_residual_move_no_score_by_a_tenth_of_its_deviation(noise):
    """In whatever direction the residual points."""
    factors, index = [dense.matern32(14, 0.3), dense.matern32(12, 0.2)], dense.observed("random", (14, 12))
    matrix = dense.system(factors, index, torch.tensor([noise], dtype=torch.float64))
    root, size = torch.linalg.cholesky(matrix), len(index)
    y, probe = root @ dense.randn(size, 1, seed=3), dense.randn(size, 1, seed=4).sign()
    to_data, to_probes = unbiased_tolerances(y, torch.tensor([noise], dtype=torch.float64))
    kernel = matrix - noise * dense.identity(size)
    for change in (kernel, noise * dense.identity(size)):  # by the logarithms of scale and noise
        whitened = torch.linalg.solve(matrix, change)
        deviation = (0.5 * (whitened @ whitened).trace()) ** 0.5
        sensitivity = torch.linalg.solve(matrix, change @ torch.linalg.solve(matrix, y))  # of the score, to a residual
        assert to_data * y.norm() * sensitivity.norm() < 1.2 * BIAS * deviation  # L^-1 y is white up to chance
        sensitivity = 0.5 * torch.linalg.solve(matrix, change @ probe)
        assert to_probes * probe.norm() * sensitivity.norm() < 1.2 * BIAS * deviation


# -- reused preconditioners --------------------------------------------------------------------------------------------

SHAPE = (9, 8)
RANK = 12
KEY = ("ignore", RANK)  # the current settings


def factors(scale=1.0, theta=0.3):
    return [scale * dense.se(SHAPE[0], theta), dense.matern32(SHAPE[1])]


def a_system(scale=1.0, noise=0.05, theta=0.3):
    index = dense.observed("random", SHAPE)
    return GapSystem(factors(scale, theta), index, torch.tensor([noise], dtype=torch.float64))


def solve(system, rhs, rank=RANK, **arguments):
    solution, report = solve_system(system, rhs, method="ignore", rank=rank, tolerance=1e-10, **arguments)
    assert report.converged
    assert dense.relative(system.dense() @ solution, rhs) < 1e-9
    return solution, report


def reused_by(memory, system, key=KEY):
    with memory.reuse_preconditioner(system, key):
        return system.reused_preconditioner


@pytest.mark.parametrize(
    ("other", "serves"),
    [
        ({}, True),
        ({"scale": 1.0 + 0.99 * MOVED}, True),
        ({"scale": 1.0 - 0.99 * MOVED}, True),
        ({"scale": 1.0 + 1.01 * MOVED}, False),
        ({"noise": 0.05 * (1.0 + 0.99 * MOVED)}, True),
        ({"noise": 0.05 * (1.0 + 1.01 * MOVED)}, False),
        ({"noise": 0.05 * (1.0 - 1.01 * MOVED)}, False),
        ({"theta": 0.32}, True),
        ({"theta": 0.9}, False),
    ],
)
def test_a_preconditioner_is_reused_nearby_and_set_up_anew_beyond(other, serves):
    memory, first, second = WarmStart(), a_system(), a_system(**other)
    rhs = dense.randn(first.num_train, 1)
    with memory.reuse_preconditioner(first, KEY):
        assert first.reused_preconditioner is None
        solve(first, rhs)
    assert first.reused_preconditioner is None
    own = first.last_preconditioner
    with memory.reuse_preconditioner(second, KEY):
        if serves:
            assert second.reused_preconditioner.left_over == math.inf
            assert own.left_over < math.inf  # what the system has itself is left as it was
            torch.testing.assert_close(second.reused_preconditioner.solve(rhs), own.solve(rhs), rtol=1e-12, atol=1e-12)
        else:
            assert second.reused_preconditioner is None
        reused = second.reused_preconditioner
        solve(second, rhs)
        assert (second.last_preconditioner is None) == serves
    assert second.reused_preconditioner is None
    third = a_system(**other)
    with memory.reuse_preconditioner(third, KEY):
        # beyond, the new one has taken its place
        assert third.reused_preconditioner is not None
        assert (third.reused_preconditioner is reused) == serves


def test_another_shape_or_another_number_of_observations_is_not_served():
    memory, first = WarmStart(), a_system()
    with memory.reuse_preconditioner(first, KEY):
        solve(first, dense.randn(first.num_train, 1))
    index = dense.observed("random", SHAPE)
    noise = torch.tensor([0.05], dtype=torch.float64)
    assert reused_by(memory, GapSystem(factors(), index[1:], noise)) is None
    assert reused_by(memory, GapSystem(factors(), index, noise.expand(len(index)))) is None
    three = [dense.se(3), dense.se(3), dense.matern32(8)]
    assert reused_by(memory, GapSystem(three, index, noise)) is None


def test_other_observed_cells_are_not_served():
    """As many observations elsewhere on the same grid: a preconditioner of other rows is none."""
    memory, first = WarmStart(), a_system()
    with memory.reuse_preconditioner(first, KEY):
        solve(first, dense.randn(first.num_train, 1))
    elsewhere = dense.observed("random", SHAPE, seed=5)
    assert len(elsewhere) == first.num_train
    assert reused_by(memory, GapSystem(factors(), elsewhere, torch.tensor([0.05], dtype=torch.float64))) is None


@pytest.mark.parametrize("key", [("ignore", RANK + 1), ("ignore", None), ("auto", RANK), None])
def test_other_settings_are_not_served(key):
    memory, first = WarmStart(), a_system()
    with memory.reuse_preconditioner(first, KEY):
        solve(first, dense.randn(first.num_train, 1))
    assert reused_by(memory, a_system(), key) is None
    assert reused_by(memory, a_system(), ("ignore", RANK)) is not None


def test_reuse_ends_with_an_exception():
    memory, first, second = WarmStart(), a_system(), a_system()
    with memory.reuse_preconditioner(first, KEY):
        solve(first, dense.randn(first.num_train, 1))
    seen = []

    def interrupted():
        with memory.reuse_preconditioner(second, KEY):
            seen.append(second.reused_preconditioner)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen[0] is not None
    assert second.reused_preconditioner is None


def test_a_system_that_needed_no_preconditioner_leaves_none():
    memory, system = WarmStart(), a_system()
    with memory.reuse_preconditioner(system, KEY):
        solve(system, dense.randn(system.num_train, 1), rank=0)
    assert reused_by(memory, a_system()) is None


def test_the_rank_asked_for_is_respected_outside_a_warm_start():
    memory, system = WarmStart(), a_system()
    rhs = dense.randn(system.num_train, 1)
    with memory.reuse_preconditioner(system, KEY):
        solve(system, rhs, rank=40)
    assert reused_by(memory, system) is not None
    _, report = solve(system, rhs, rank=5)
    assert report.rank == 5
    assert system.last_preconditioner.rank == 5
    _, plain = solve(a_system(), rhs, rank=5)
    assert report.iterations == plain.iterations


def sum_operator(scale=1.0):
    index = dense.observed("random", SHAPE)
    terms = [
        SelectedKroneckerOperator(*own, row_index=index, col_index=index)
        for own in (factors(scale), [dense.matern32(SHAPE[0], 0.1), dense.se(SHAPE[1], 0.2)])
    ]
    return (terms[0] + terms[1]).add_diagonal(torch.tensor([0.05], dtype=torch.float64))


@pytest.mark.parametrize(("scale", "serves"), [(1.0 + 0.9 * MOVED, True), (1.0 + 1.1 * MOVED, False)])
def test_sums_reuse_theirs_too(scale, serves):
    memory, first, second = WarmStart(), sum_operator(), sum_operator(scale)
    rhs = dense.randn(first.size(-1), 1)
    with settings.gap_method("ignore"), settings.preconditioner_rank(RANK), settings.solve_tolerance(1e-10):
        with memory.reuse_preconditioner(first.system(), KEY):
            first.solve(rhs)
        system = second.system()
        with memory.reuse_preconditioner(system, KEY):
            assert (system.reused_preconditioner is not None) == serves
            assert not serves or system.reused_preconditioner.left_over == math.inf
            solution = second.solve(rhs)
        assert system.reused_preconditioner is None
    assert dense.relative(second.to_dense() @ solution, rhs) < 1e-9


# -- arguments and plain data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_probes": 0}, "num_probes: got 0, expected an integer, at least 1"),
        ({"num_probes": -3}, "num_probes: got -3"),
        ({"num_probes": 2.0}, r"num_probes: got 2\.0"),
        ({"num_probes": True}, "num_probes: got True"),
        ({"num_probes": None}, "num_probes: got None"),
        ({"tolerance": 0.0}, r"tolerance: got 0\.0, expected a number between 0 and 1"),
        ({"tolerance": 1.0}, r"tolerance: got 1\.0"),
        ({"tolerance": -1e-3}, r"tolerance: got -0\.001"),
        ({"tolerance": math.nan}, "tolerance: got nan"),
        ({"tolerance": "1e-2"}, "tolerance: got '1e-2'"),
        ({"loosest": 0.0}, r"loosest: got 0\.0, expected a number between 0 and 1"),
        ({"loosest": 1.5}, r"loosest: got 1\.5"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"WarmStart: {message}"):
        WarmStart(**arguments)


@pytest.mark.parametrize("seed", ["a", 0.5, 1.0, None, -1, True])
def test_a_bad_seed_is_refused_where_it_is_given(seed):
    with pytest.raises(ValueError, match=f"WarmStart: seed: got {seed!r}, expected an integer, at least 0"):
        WarmStart(seed=seed)


@pytest.mark.parametrize("value", [True, 4, "warm"])
def test_the_setting_takes_a_warm_start_or_none(value):
    with pytest.raises(ValueError, match=r"settings\.warm_start: got .*, expected a WarmStart or None"):
        settings.warm_start(value)


def test_state_dict_round_trip(tmp_path):
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    memory.keep(a_path(matrix, rhs, probes, start=3.0, error=0.5))
    memory.keep(a_path(matrix[1:, 1:], rhs[1:], probes[1:]))
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    copied = WarmStart(num_probes=2)
    copied.keep(a_path(dense.random_psd(7), dense.randn(7, 1), copied.probes(7, LIKE)))  # to be replaced
    copied.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    assert torch.equal(copied.guess(cells_of(rhs), rhs), memory.guess(cells_of(rhs), rhs))
    assert torch.equal(copied.guess(cells_of(rhs[1:]), rhs[1:]), memory.guess(cells_of(rhs[1:]), rhs[1:]))
    assert copied.guess(torch.arange(0, 21, 3), dense.randn(7, 1)) is None
    new = a_path(1.05 * matrix, rhs, probes)
    ours, theirs = (m.advance(cells_of(rhs), new.solutions, new.images) for m in (memory, copied))
    assert torch.equal(ours.value, theirs.value)
    assert torch.equal(ours.standard_error, theirs.standard_error)


def test_a_state_is_a_copy_that_later_steps_leave_alone():
    rows, memory = 30, WarmStart(num_probes=2)
    matrix, rhs, probes = dense.random_psd(rows), dense.randn(rows, 1), memory.probes(rows, LIKE)
    memory.keep(a_path(matrix, rhs, probes))
    state, before = memory.state_dict(), memory.guess(cells_of(rhs), rhs).clone()
    new = a_path(1.05 * matrix, rhs, probes)
    memory.keep(memory.advance(cells_of(rhs), new.solutions, new.images))
    assert not torch.equal(memory.guess(cells_of(rhs), rhs), before)
    memory.load_state_dict(state)
    assert torch.equal(memory.guess(cells_of(rhs), rhs), before)
    assert float(memory._paths[rows].value) == 0.0


def test_str_tells_all_apart_that_give_other_numbers():
    """A checkpoint uses this text to recognise its problem."""
    others = {"num_probes": 5, "tolerance": 1e-3, "loosest": 0.3, "seed": 1}
    strings = {str(WarmStart()), *(str(WarmStart(**{name: value})) for name, value in others.items())}
    assert len(strings) == 1 + len(others)
    assert str(WarmStart()) == str(WarmStart(4, None, loosest=0.1, seed=0))
    assert str(WarmStart(3, 1e-3, loosest=0.2, seed=7)) == "3 probes of seed 7, to 0.001, at most 0.2"
