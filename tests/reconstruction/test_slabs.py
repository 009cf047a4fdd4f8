"""Every form of the same values gives the same slabs, the same mean, and is left as it was; what is wrong is named."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpytorch_gaps as gaps
from gpytorch_gaps.reconstruction import slabs
from gpytorch_gaps.reconstruction.slabs import Slabs
from tests import _dense as dense
from tests._covering import covering

SHAPE = (7, 4, 5)
NAN = float("nan")


def field(dtype=np.float64, gaps_too=True):
    values = dense.randn(*SHAPE, seed=3).numpy().round(3) + 2.0
    if gaps_too:
        values[np.random.default_rng(0).random(SHAPE) < 0.3] = NAN
    return values.astype(dtype)


def whole_numbers():
    return np.arange(math.prod(SHAPE)).reshape(SHAPE) % 11


def gathered(values, shape=None):
    """All slabs put together, and the first slice of each."""
    parts = list(Slabs(values, shape))
    starts = [start for start, _ in parts]
    assert starts == list(np.cumsum([0, *(len(slab) for _, slab in parts)])[:-1])
    return torch.cat([slab for _, slab in parts]), starts


def kernels():
    return [dense.matern32(size) for size in SHAPE]


def mean_of(values, axes=None, **options):
    """The whole posterior mean."""
    options = {"tolerance": 1e-10, "progress": False, **options}
    result = gaps.reconstruct(values, axes, kernels(), 0.1, **options)
    return result.slab(0, SHAPE[0])


def by_hand(values, mean=0.0):
    y = torch.as_tensor(np.ascontiguousarray(values, dtype=np.float64)).flatten()
    index = (~y.isnan()).nonzero().squeeze(-1)
    noise = torch.tensor([0.1], dtype=torch.float64)
    a = torch.linalg.solve(dense.system(kernels(), index, noise), y[index] - mean)
    return (dense.kron(kernels())[:, index] @ a + mean).view(SHAPE)


class Sliced:
    """What zarr, HDF5 and dask arrays have in common: a shape, a dtype and slices."""

    def __init__(self, array, with_dtype=True):
        self._array, self.shape, self.asked = array, array.shape, []
        if with_dtype:
            self.dtype = array.dtype

    def __getitem__(self, key):
        assert isinstance(key, slice)
        self.asked.append((key.start, key.stop))
        return self._array[key]


class ArrayLike:
    """Slices that are no NumPy arrays, but become some."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key):
        return ArrayLike(self._array[key])

    def __array__(self, dtype=None, copy=None):
        return self._array if dtype is None else self._array.astype(dtype)


# -- kinds of values -------------------------------------------------------------------------------------------------


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


KINDS = {
    "tensor": torch.from_numpy,
    "tensor that is a view": lambda a: torch.from_numpy(np.repeat(a, 2, -1))[..., ::2],
    "permuted tensor": lambda a: torch.from_numpy(np.ascontiguousarray(a.T)).permute(2, 1, 0),
    "tensor with gradient": lambda a: torch.from_numpy(a).requires_grad_(a.dtype.kind == "f"),
    "array": lambda a: a,
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "Fortran order": np.asfortranarray,
    "other order": lambda a: np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2),
    "read-only": read_only,
    "flipped": lambda a: np.ascontiguousarray(a[::-1, :, ::-1])[::-1, :, ::-1],
    "strided": lambda a: np.repeat(a, 3, 1)[:, ::3],
    "masked array": lambda a: np.ma.masked_invalid(a),
    "masked array without a mask": lambda a: np.ma.array(a),
    "sliced": Sliced,
    "array-like": ArrayLike,
    "slices that are tensors": lambda a: Sliced(torch.from_numpy(a)),
}


def snapshot(values):
    """What is in there, bit by bit, whatever it is."""
    inside = getattr(values, "_array", values)
    inside = inside.detach().numpy() if torch.is_tensor(inside) else np.asarray(inside)
    return inside.copy().tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(monkeypatch, kind, dtype):
    monkeypatch.setattr(slabs, "_READ_NUMBERS", 40)  # two slices at a time
    floating = dtype.startswith("float")
    plain = field(dtype) if floating else whole_numbers().astype(dtype)
    values = KINDS[kind](plain.copy())
    before = snapshot(values)
    together, starts = gathered(values)
    np.testing.assert_array_equal(together.detach().double().numpy(), plain.astype(np.float64))
    assert together.is_floating_point()
    assert starts == [0, 2, 4, 6]
    assert Slabs(values, None).shape == SHAPE
    assert Slabs(values, SHAPE).shape == SHAPE
    assert Slabs(values, None).dtype == (torch.float32 if dtype == "float32" else torch.float64)
    assert snapshot(values) == before


@pytest.mark.parametrize(("dtype", "mean"), [("float64", 1.5), ("float32", 0.0), ("int64", 1.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_that_of_the_plain_array_and_values_are_left_alone(kind, dtype, mean):
    plain = field(dtype) if dtype.startswith("float") else whole_numbers().astype(dtype)
    values = KINDS[kind](plain.copy())
    before = snapshot(values)
    got = mean_of(values, mean=mean)
    assert snapshot(values) == before
    assert got.dtype == (torch.float32 if dtype == "float32" else torch.float64)
    assert not got.requires_grad
    assert dense.relative(got, by_hand(plain, mean)) < (1e-6 if dtype == "float32" else 1e-8)


@pytest.mark.parametrize("dtype", [np.float16, ">f2", np.longdouble, np.uint16, np.uint32, np.uint64, np.int8, ">i4"])
def test_numbers_of_other_sizes(dtype):
    kind = np.dtype(dtype).kind
    plain = field(gaps_too=False).round(1) if kind == "f" else whole_numbers()
    together, _ = gathered(plain.astype(dtype))
    torch.testing.assert_close(together.double(), torch.as_tensor(plain.astype(dtype).astype(np.float64)))


def test_half_precision_gives_the_same_precision_from_a_tensor_and_from_an_array():
    half = field().astype(np.float16)
    assert Slabs(torch.from_numpy(half), None).dtype == Slabs(half, None).dtype


def test_a_memmap_is_read_and_never_written(tmp_path):
    path = tmp_path / "values.npy"
    np.save(path, field("float32"))
    before = path.read_bytes()
    for mode in ("r", "r+", "c"):
        values = np.load(path, mmap_mode=mode)
        assert isinstance(values, np.memmap)
        got = mean_of(values, mean=1.0)
        assert dense.relative(got, by_hand(field("float32"), 1.0)) < 1e-6
        del values
    assert path.read_bytes() == before


def test_masked_numbers_are_gaps_whatever_is_under_the_mask():
    plain = field()
    hidden = np.ma.masked_array(np.where(np.isnan(plain), np.inf, plain), np.isnan(plain))
    assert dense.relative(mean_of(hidden), by_hand(plain)) < 1e-8
    whole = whole_numbers()
    masked = np.ma.masked_array(whole, whole % 3 == 0)
    expected = np.where(whole % 3 == 0, NAN, whole)
    assert dense.relative(mean_of(masked), by_hand(expected)) < 1e-8
    assert bool((masked.data == whole).all())
    parts = [masked[:3], masked[3:]]
    axes = [np.arange(size) for size in SHAPE]
    assert dense.relative(mean_of(parts, axes), by_hand(expected)) < 1e-8


def test_a_masked_array_may_hide_nan_as_well_as_show_it():
    plain = field()
    hidden = plain.copy()
    hidden[0, 0, 0] = 99.0
    values = np.ma.masked_array(hidden, np.zeros(SHAPE, dtype=bool))
    values[0, 0, 0] = np.ma.masked
    expected = plain.copy()
    expected[0, 0, 0] = NAN
    assert dense.relative(mean_of(values), by_hand(expected)) < 1e-8


def test_an_xarray_is_read_as_its_values():
    xarray = pytest.importorskip("xarray")
    values = xarray.DataArray(field("float32"), dims=("a", "b", "c"))
    got = mean_of(values)
    assert got.dtype == torch.float32
    assert dense.relative(got, by_hand(field("float32"))) < 1e-6


def test_only_the_slab_that_is_wanted_is_read(monkeypatch):
    monkeypatch.setattr(slabs, "_READ_NUMBERS", 60)
    values = Sliced(field())
    iterator = iter(Slabs(values, None))
    assert values.asked == []
    next(iterator)
    assert values.asked == [(0, 3)]
    list(iterator)
    assert values.asked == [(0, 3), (3, 6), (6, 7)]


def test_a_slice_larger_than_a_slab_is_still_read(monkeypatch):
    monkeypatch.setattr(slabs, "_READ_NUMBERS", 1)
    together, starts = gathered(field())
    assert starts == list(range(7))
    np.testing.assert_array_equal(together.numpy(), field())


def test_an_object_without_a_dtype():
    assert Slabs(Sliced(field("float32"), with_dtype=False), None).dtype == torch.float64
    assert dense.relative(mean_of(Sliced(field(), with_dtype=False)), by_hand(field())) < 1e-8


# -- iterables -------------------------------------------------------------------------------------------------------


@covering(
    kind=["array", "tensor", "big-endian", "Fortran order", "read-only", "masked array"],
    cuts=[(), (1,), (1, 3, 6), (3, 3, 5), (1, 2, 3, 4, 5, 6)],
    form=[list, tuple, iter, lambda parts: (part for part in parts)],
)
def test_slabs_of_any_thickness_are_joined(kind, cuts, form):
    """Slabs of any thickness, including zero."""
    parts = [KINDS[kind](part.copy()) for part in np.split(field(), cuts)]
    before = [snapshot(part) for part in parts]
    together, starts = gathered(form(parts), SHAPE)
    np.testing.assert_array_equal(together.numpy(), field())
    assert starts == [0, *cuts]
    assert [snapshot(part) for part in parts] == before


def test_slabs_of_different_kinds():
    whole = field()
    parts = [torch.from_numpy(whole[:2]).float(), np.asfortranarray(whole[2:3]), whole[3:5].tolist(), whole[5:]]
    axes = [np.arange(size) for size in SHAPE]
    got = mean_of((part for part in parts), axes)
    assert got.dtype == torch.float64
    assert dense.relative(got, by_hand(whole)) < 1e-6


@settings(max_examples=25)
@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 200), st.booleans())
def test_any_cut_gives_the_same(cuts, numbers, as_iterable):
    parts = np.split(field(), sorted(cuts))
    before = slabs._READ_NUMBERS
    slabs._READ_NUMBERS = numbers
    try:
        together, _ = gathered(parts, SHAPE) if as_iterable else gathered(field())
    finally:
        slabs._READ_NUMBERS = before
    np.testing.assert_array_equal(together.numpy(), field())


def test_a_generator_is_gone_through_once_and_slab_by_slab():
    """A slab is asked for when the one before has been worked on."""
    alive = []

    def parts():
        for start in range(7):
            alive.append(start)
            yield field()[start : start + 1]

    iterator = iter(Slabs(parts(), SHAPE))
    next(iterator)
    assert alive == [0]
    assert len(list(iterator)) == 6


def test_slabs_of_one_dimension_are_joined():
    values = field().ravel()[:20]
    together, starts = gathered([values[:7], values[7:]], (20,))
    np.testing.assert_array_equal(together.numpy(), values)
    assert starts == [0, 7]


# -- what is refused -------------------------------------------------------------------------------------------------


REFUSED = {
    "shape": (field(), (7, 4, 6), r"values: got shape \(7, 4, 5\), expected \(7, 4, 6\)"),
    "a number": (3.0, (3,), "values: got float, expected an array, or an iterable of slabs"),
    "nothing": (None, (3,), "values: got NoneType"),
    "no dimension": (np.array(3.0), None, r"values: got shape \(\)"),
    "an empty dimension": (np.zeros((3, 0)), None, r"values: got shape \(3, 0\)"),
    "an iterable without a shape": ([field()], None, "axes: got none"),
    "too few slices": ([field()[:3], field()[:3]], SHAPE, "values: got 6 slices, expected 7"),
    "none at all": ([], SHAPE, "values: got 0 slices, expected 7"),
    "too many slices": ([field(), field()[:1]], SHAPE, "values: got more than 7 slices"),
    "wrong rest": ([field()[:2], field()[2:, :, :4]], SHAPE, r"the slab that begins at slice 2 has shape \(5, 4, 4\)"),
    "slices for slabs": (list(field()), SHAPE, r"begins at slice 0 has shape \(4, 5\), expected \(k, 4, 5\)"),
    "rest merged": ([field().reshape(7, 20)], SHAPE, r"has shape \(7, 20\)"),
    "complex array": (field() + 1j, None, "values: got complex128, expected real numbers"),
    "complex tensor": (torch.from_numpy(field()) + 1j, None, "values: got .*complex128"),
    "complex slab": ([torch.from_numpy(field()).cfloat()], SHAPE, "values: got .*complex64"),
    "strings": (field().astype(str), None, "values: got <U.*, expected real numbers"),
    "a string": ("seven", (5,), "values: got <U1"),
    "objects": (field().astype(object), None, "values: got object"),
    "dates": (whole_numbers().astype("datetime64[D]"), None, "values: got datetime64"),
    "ragged": ([[[1.0], [1.0, 2.0]]], SHAPE, "values"),
    "a dictionary": ({"a": 1.0}, (1,), "values: got <U1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(case):
    values, shape, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        list(Slabs(values, shape))


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0, 0), (2, 3, 4), (6, 1, 0)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("cuts", [None, (1, 3)])
def test_infinities_are_named_by_their_place_in_the_grid(monkeypatch, where, infinity, dtype, cuts):
    monkeypatch.setattr(slabs, "_PROJECT_NUMBERS", 40)  # so that a place in a slab is not one in the grid
    values = field(dtype)
    values[where] = infinity
    given_values = values if cuts is None else np.split(values, cuts)
    axes = None if cuts is None else [np.arange(size) for size in SHAPE]
    with pytest.raises(ValueError, match=rf"values: entry \({where[0]}, {where[1]}, {where[2]}\) is infinite"):
        mean_of(given_values, axes)


def test_a_value_whose_square_overflows_is_named_by_its_own_place():
    values = field()
    values[2, 3, 4] = 1e200
    with pytest.raises(ValueError, match=r"values: entry \(2, 3, 4\)"):
        mean_of(values)


@pytest.mark.parametrize("kind", ["array", "tensor", "masked array", "iterable"])
def test_nothing_but_gaps(kind):
    nothing = np.full(SHAPE, NAN)
    axes = [np.arange(size) for size in SHAPE] if kind == "iterable" else None
    values = [nothing[:2], nothing[2:]] if kind == "iterable" else KINDS[kind](nothing)
    with pytest.raises(ValueError, match="values: got 140 entries, all of them gaps; expected at least one"):
        mean_of(values, axes)
