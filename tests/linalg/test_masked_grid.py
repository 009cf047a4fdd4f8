"""Sweeps over a mask, tile by tile, against ``Phi' diag(mask) Phi`` written out; threads, and who pays for them."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gpytorch_gaps.linalg import gram
from gpytorch_gaps.linalg import masked_grid as tiles
from gpytorch_gaps.linalg.masked_grid import MaskedGrid, project_flops, run_in_threads, sweep_flops
from tests import _dense as dense
from tests._covering import covering

examples = settings(max_examples=80)
SIZES = {  # shape and ranks
    "1 axis": ((30,), (4,)),
    "long first": ((20, 6), (5, 3)),
    "long last": ((6, 20), (3, 5)),
    "3 axes, long first": ((17, 4, 3), (5, 3, 2)),
    "3 axes, long last": ((3, 4, 17), (2, 3, 5)),
    "long middle": ((3, 11, 4), (2, 6, 3)),
    "4 axes": ((3, 4, 2, 5), (2, 3, 2, 4)),
    "4 axes, long first": ((9, 2, 3, 2), (4, 2, 2, 1)),
    "full bases": ((4, 5, 3), (4, 5, 3)),
    "more functions than cells": ((3, 2), (7, 5)),
    "single cells": ((1, 7, 1), (1, 3, 1)),
    "one cell": ((1,), (1,)),
}
MASKS = ("all", "none", "one", "one gap", "random", "block", "slice")
TILES = (1, 3, 17, None)
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-6}


def observed(kind, shape, seed=0):
    if kind in ("all", "none"):
        return torch.full(shape, kind == "all")
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[dense.observed({"one": "one observation"}.get(kind, kind), shape, seed=seed)] = True
    return mask.view(shape)


def problem(shape, ranks, dtype=torch.float64, seed=0):
    """Any bases and weights: no identity here needs orthonormal ones."""
    bases = [dense.randn(m, r, seed=seed + i).to(dtype) for i, (m, r) in enumerate(zip(shape, ranks, strict=True))]
    return bases, dense.randn(*ranks, seed=seed + 9).to(dtype)


def expected(mask, bases, weights):
    """``Phi' M Phi w`` and ``Phi' M 1``, dense float64."""
    phi = dense.kron([basis.double() for basis in bases])
    on = mask.flatten().double()
    field = on * (phi @ weights.double().flatten())
    return (phi.mT @ field).view(weights.shape), (phi.mT @ on).view(weights.shape)


def assert_sweeps(grid, mask, bases, weights):
    """Both, within the rounding of sums of this size."""
    gram_of, projected = expected(mask, bases, weights)
    close = CLOSE[bases[0].dtype]
    phi = dense.kron([basis.double().abs() for basis in bases])
    field = phi @ weights.double().abs().flatten()
    got = grid.gram(bases, weights), grid.project(bases)
    for result, value, scale in zip(
        got, (gram_of, projected), (phi.mT @ field, phi.mT @ torch.ones_like(field)), strict=True
    ):
        assert result.dtype == bases[0].dtype
        assert result.shape == weights.shape
        assert bool(((result.double() - value).abs() <= close * scale.view(value.shape)).all())


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[:2] if name in ("mm", "bmm") else args[1:3]
            self.flops += 2 * left.numel() * right.size(-1)
        return func(*args, **(kwargs or {}))


@covering(sizes=SIZES, tile=TILES, dtype=[torch.float32, torch.float64])
def test_sweeps_equal_dense_algebra(sizes, tile, dtype):
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks, dtype)
    mask = observed("random", shape)
    assert_sweeps(MaskedGrid(mask, tile), mask, bases, weights)


@covering(kind=MASKS, sizes=["1 axis", "long first", "3 axes, long last", "4 axes"], as_bytes=[False, True])
def test_any_mask_is_taken_and_left_alone(sizes, as_bytes, kind):
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    mask = observed(kind, shape)
    given_mask = mask.to(torch.uint8) if as_bytes else mask.clone()
    before = given_mask.clone()
    grid = MaskedGrid(given_mask)
    assert_sweeps(grid, mask, bases, weights)
    assert torch.equal(given_mask, before)
    assert grid.count() == int(mask.sum())
    assert grid.observed.dtype == torch.bool
    assert torch.equal(grid.observed, mask)
    assert (grid.shape, grid.num_cells) == (shape, math.prod(shape))


@covering(
    sizes=["1 axis", "long first", "long last", "3 axes, long first", "long middle", "4 axes"],
    tile=[1, 12, 1000],
    block=[1, 7, 40],
    rows=[1, 2, 5],
)
def test_many_tiles_and_blocks(monkeypatch, sizes, tile, block, rows):
    """Sizes that leave a rest in every direction."""
    monkeypatch.setattr(tiles, "_TILE_ROWS", rows)
    monkeypatch.setattr(tiles, "_BLOCK_NUMBERS", block)
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    mask = observed("random", shape)
    assert_sweeps(MaskedGrid(mask, tile), mask, bases, weights)


@pytest.mark.parametrize("first", [True, False], ids=["the first", "the last"])
@pytest.mark.parametrize("sizes", [name for name in SIZES if not name.startswith(("1 ", "one"))])
def test_either_axis_may_be_carried(monkeypatch, sizes, first):
    """Whichever is cheaper is taken; both must be right."""
    monkeypatch.setattr(tiles, "_TILE_ROWS", 3)
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    mask = observed("random", shape)
    grid = MaskedGrid(mask, 10)
    value, projected = expected(mask, bases, weights)
    torch.testing.assert_close(grid._carry(bases, weights, first).view(ranks), value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grid._carry(bases, None, first).view(ranks), projected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", [name for name in SIZES if not name.startswith(("1 ", "one"))])
def test_the_cheaper_axis_is_carried(sizes):
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    grid = MaskedGrid(observed("random", shape))
    costs = {}
    for first in (True, False):
        with Products() as products:
            grid._carry(bases, weights, first)
        costs[first] = products.flops
    with Products() as products:
        grid.gram(bases, weights)
    assert products.flops == min(costs.values())


def test_either_axis_is_the_cheaper_one_somewhere():
    """Else half of the code would go untested above."""
    ways = set()
    for shape, ranks in SIZES.values():
        if len(shape) > 1:
            ways.add(tiles._carry_flops(shape, ranks, True) <= tiles._carry_flops(shape, ranks, False))
    assert ways == {True, False}


@examples
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 7, 30, None]),
    st.floats(0.0, 1.0),
    st.integers(0, 10**6),
)
def test_gram_is_the_masked_gram_whatever_the_shape(sizes, tile, share, seed):
    shape, ranks = (tuple(part) for part in zip(*sizes, strict=True))
    bases, weights = problem(shape, ranks, seed=seed)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    grid = MaskedGrid(mask, tile)
    assert_sweeps(grid, mask, bases, weights)
    # what follows from it: symmetric
    other = dense.randn(*ranks, seed=seed + 100)
    image, image_of_other = grid.gram(bases, weights), grid.gram(bases, other)
    scale = max(1.0, float(image.norm() * other.norm()))
    assert float((other * image).sum()) == pytest.approx(float((image_of_other * weights).sum()), abs=1e-11 * scale)


def test_orthonormal_bases_without_gaps_give_the_weights_back():
    bases = [torch.linalg.qr(basis).Q for basis in problem((40, 30, 5), (8, 6, 3))[0]]
    weights = dense.randn(8, 6, 3)
    grid = MaskedGrid(torch.ones(40, 30, 5, dtype=torch.bool))
    torch.testing.assert_close(grid.gram(bases, weights), weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sizes", ["long first", "long last"])
def test_more_cells_than_a_tile_holds(sizes):
    """The defaults, on a grid of several tiles and strips."""
    shape, ranks = {"long first": ((1500, 700), (6, 2)), "long last": ((700, 1500), (2, 6))}[sizes]
    assert 8 * math.prod(shape) > 2 * tiles._TILE_BYTES
    bases, weights = problem(shape, ranks)
    mask = observed("random", shape)
    field = mask * (bases[0] @ weights @ bases[1].mT)
    grid = MaskedGrid(mask)
    assert dense.relative(grid.gram(bases, weights), bases[0].mT @ field @ bases[1]) < 1e-13
    assert dense.relative(grid.project(bases), bases[0].mT @ mask.double() @ bases[1]) < 1e-12
    assert grid.count() == int(mask.sum())


def test_weights_of_another_precision_follow_the_bases():
    """A solver keeps its vectors in float64, and sweeps in float32."""
    bases, weights = problem((9, 8), (3, 4), torch.float32)
    mask = observed("random", (9, 8))
    result = MaskedGrid(mask).gram(bases, weights.double() + 1e-12)
    assert result.dtype == torch.float32
    assert dense.relative(result, expected(mask, bases, weights)[0]) < 1e-6


def test_inputs_of_any_layout():
    """Transposed masks and weights, bases that are views."""
    (first, second), weights = problem((9, 8), (3, 4))
    mask = observed("random", (8, 9)).mT
    assert not mask.is_contiguous()
    strided = [first.repeat_interleave(2, -1)[:, ::2], second.mT.contiguous().mT]
    assert_sweeps(MaskedGrid(mask), mask, strided, weights.mT.contiguous().mT)


def test_a_contiguous_mask_is_kept_not_copied():
    mask = observed("random", (9, 8))
    assert MaskedGrid(mask).observed.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int8])
def test_masks_of_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match=f"observed: got {dtype}, expected torch.bool or torch.uint8"):
        MaskedGrid(torch.ones(3, 2, dtype=dtype))


# -- the Gram matrix of leading functions, from sweeps ---------------------------------------------------------------


@covering(
    kind=["all", "none", "one", "random", "block"],
    sizes=["1 axis", "long first", "3 axes, long last", "4 axes"],
    numbers=[1, 20, 2**24],
)
def test_a_gram_matrix_needs_projections_of_the_mask_only(monkeypatch, sizes, kind, numbers):
    """``structured_gram`` needs of a mask nothing but its projections on products of pairs."""
    monkeypatch.setattr(gram, "_CHUNK_NUMBERS", numbers)
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    mask = observed(kind, shape)
    chosen = torch.randperm(weights.numel(), generator=torch.Generator().manual_seed(1))[: max(1, weights.numel() // 2)]
    positions = torch.stack(torch.unravel_index(chosen, ranks))
    columns = dense.kron(bases)[:, chosen]
    got = gram.structured_gram(bases, positions, MaskedGrid(mask, 7).project)
    torch.testing.assert_close(got, columns.mT @ (mask.double().view(-1, 1) * columns), rtol=1e-11, atol=1e-11)


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads(monkeypatch):
    """Torch with two threads, grids of any size worth them, and many strips; counts the pools."""
    before = torch.get_num_threads()
    monkeypatch.setattr(tiles, "_MIN_CELLS_FOR_THREADS", 0)
    monkeypatch.setattr("gpytorch_gaps.utils.threads._MIN_FLOPS_FOR_THREADS", 0)
    monkeypatch.setattr(tiles, "_TILE_ROWS", 3)
    pools, executor = [], tiles.ThreadPoolExecutor
    monkeypatch.setattr(tiles, "ThreadPoolExecutor", lambda count: pools.append(count) or executor(count))
    torch.set_num_threads(2)
    yield pools
    torch.set_num_threads(before)


def threads_elsewhere():
    """What a thread that starts now would use."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sizes", ["long first", "long last", "3 axes, long first", "3 axes, long last", "4 axes"])
def test_threads_give_the_same_and_leave_torch_as_it_was(two_threads, sizes, mode):
    shape, ranks = SIZES[sizes]
    with mode():
        bases, weights = problem(shape, ranks)
        mask = observed("random", shape)
        assert_sweeps(MaskedGrid(mask, 6), mask, bases, weights)
    assert set(two_threads) == {2}
    assert torch.get_num_threads() == 2
    assert threads_elsewhere() == 2
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_from_before_a_mode_serve_inside_it_and_the_other_way_round(two_threads, mode):
    shape, ranks = SIZES["long first"]
    bases, weights = problem(shape, ranks)
    mask = observed("random", shape)
    with mode():
        inside = MaskedGrid(mask, 6).gram(bases, weights)
        made_inside = MaskedGrid(mask.clone(), 6), [basis.clone() for basis in bases], weights.clone()
    grid, copies, weights_inside = made_inside
    torch.testing.assert_close(inside, expected(mask, bases, weights)[0])
    torch.testing.assert_close(grid.gram(copies, weights_inside), inside)


def test_work_is_shared_out_once_each():
    done, lock = [], threading.Lock()

    def work(part):
        with lock:
            done.append(part.start)

    run_in_threads(work, [slice(i, i + 1) for i in range(50)], torch.empty(0))
    assert sorted(done) == list(range(50))


def test_threads_share_out_work_once_each_and_use_one_thread_of_torch(two_threads):
    done, lock = [], threading.Lock()

    def work(part):
        with lock:
            done.append((part.start, torch.get_num_threads(), threading.get_ident()))

    run_in_threads(work, [slice(i, i + 1) for i in range(50)], torch.empty(10))
    assert sorted(start for start, _, _ in done) == list(range(50))
    assert {count for _, count, _ in done} == {1}
    assert threading.get_ident() not in {ident for _, _, ident in done}


@pytest.mark.parametrize("failing", [0, 3, 9])
def test_work_that_raises_is_heard_and_leaves_torch_as_it_was(two_threads, failing):
    def work(part):
        if part.start == failing:
            raise ZeroDivisionError("in a strip")

    with pytest.raises(ZeroDivisionError, match="in a strip"):
        run_in_threads(work, [slice(i, i + 1) for i in range(10)], torch.empty(10))
    assert two_threads == [2]
    assert torch.get_num_threads() == 2
    assert threads_elsewhere() == 2


def test_a_sweep_that_raises_leaves_torch_as_it_was(two_threads, monkeypatch):
    shape, ranks = SIZES["long first"]
    bases, weights = problem(shape, ranks)
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise MemoryError("no more")

        patch.setattr(torch, "mm", full)
        with pytest.raises(MemoryError, match="no more"):
            MaskedGrid(observed("random", shape), 6).gram(bases, weights)
    assert torch.get_num_threads() == 2
    assert_sweeps(MaskedGrid(observed("random", shape), 6), observed("random", shape), bases, weights)


@pytest.mark.parametrize("why", ["small", "one thread"])
def test_threads_are_not_started_for_nothing(two_threads, monkeypatch, why):
    shape, ranks = SIZES["long first"]
    if why == "small":
        monkeypatch.setattr(tiles, "_MIN_CELLS_FOR_THREADS", math.prod(shape) + 1)
    else:
        torch.set_num_threads(1)
    bases, weights = problem(shape, ranks)
    mask = observed("random", shape)
    assert_sweeps(MaskedGrid(mask, 10**12), mask, bases, weights)
    assert two_threads == []


# -- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [10, None])
@pytest.mark.parametrize("sizes", SIZES)
def test_flops_are_those_that_are_made(sizes, tile):
    shape, ranks = SIZES[sizes]
    bases, weights = problem(shape, ranks)
    grid = MaskedGrid(observed("random", shape), tile)
    with Products() as of_gram:
        grid.gram(bases, weights)
    with Products() as of_project:
        grid.project(bases)
    assert of_gram.flops == sweep_flops(shape, ranks)
    assert of_project.flops == project_flops(shape, ranks)
    assert sweep_flops(shape, ranks) >= 4.0 * math.prod(shape) * min(ranks[0], ranks[-1])
