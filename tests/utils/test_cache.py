"""The cache: the same data is worked out once, other data never mistaken for it."""

import copy
import gc
import pickle

import pytest
import torch

from gpytorch_gaps.utils.cache import TensorCache


class Counter:
    """Counts how often it had to work, and gives something new every time."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return ("value", self.calls)


def test_the_same_tensors_hit():
    cache, work = TensorCache(), Counter()
    a, b = torch.ones(3), torch.arange(4)
    first = cache.cached("name", (a, b), work)
    assert cache.cached("name", (a, b), work) is first
    assert cache.cached("name", [a, b], work) is first
    assert work.calls == 1


def test_another_python_object_over_the_same_memory_hits():
    cache, work = TensorCache(), Counter()
    a = torch.ones(3, requires_grad=True)
    first = cache.cached("name", (a,), work)
    assert cache.cached("name", (a.detach(),), work) is first
    assert cache.cached("name", (a.view(3),), work) is first


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[0].fill_(7),
        lambda t: t.view(-1).mul_(2),
        lambda t: t.detach().zero_(),
        lambda t: t.copy_(torch.full_like(t, 3.0)),
    ],
)
def test_a_change_in_place_misses(change):
    cache, work = TensorCache(), Counter()
    a = torch.ones(4)
    cache.cached("name", (a,), work)
    change(a)
    cache.cached("name", (a,), work)
    assert work.calls == 2


def test_a_parameter_update_misses():
    cache, work = TensorCache(), Counter()
    parameter = torch.nn.Parameter(torch.ones(2))
    cache.cached("name", (parameter,), work)
    with torch.no_grad():
        parameter.addcdiv_(torch.ones(2), torch.full((2,), 3.0), value=-0.1)  # as optimisers write
    cache.cached("name", (parameter,), work)
    assert work.calls == 2


def test_equal_numbers_in_other_storage_miss():
    cache, work = TensorCache(), Counter()
    a = torch.ones(3)
    cache.cached("name", (a,), work)
    cache.cached("name", (a.clone(),), work)
    assert work.calls == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.mT,  # same memory and shape, other strides
        lambda t: t[:2],
        lambda t: t[1:],
        lambda t: t.reshape(9),
        lambda t: t.view(torch.int64),
        lambda t: t.expand(2, 3, 3),
    ],
)
def test_other_views_of_the_same_memory_miss(other):
    cache, work = TensorCache(), Counter()
    a = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    cache.cached("name", (a,), work)
    cache.cached("name", (other(a),), work)
    assert work.calls == 2


def test_names_and_order_are_part_of_the_key():
    cache, work = TensorCache(8), Counter()
    a, b = torch.ones(3), torch.ones(3)
    values = {
        cache.cached("one", (a, b), work),
        cache.cached("two", (a, b), work),
        cache.cached(("one", 2), (a, b), work),
        cache.cached("one", (b, a), work),
        cache.cached("one", (a,), work),
    }
    assert len(values) == work.calls == 5


def test_an_entry_keeps_the_memory_of_its_tensors():
    """Freed memory is handed out again: without this, other data of the same shape would be taken for it."""
    cache, work = TensorCache(), Counter()
    tensor = torch.full((1000,), 1.0)
    cache.cached("name", (tensor,), work)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    others = [torch.full((1000,), 2.0) for _ in range(50)]
    assert all(other.data_ptr() != address for other in others)
    for other in others:
        cache.cached("name", (other,), work)
    assert work.calls == 51


def test_memory_is_let_go_with_the_entry():
    """The memory of the evicted tensor is free again."""
    cache, work = TensorCache(1), Counter()

    def entries():
        return [kept for _, tensors in cache._entries.values() for kept in tensors]

    a = torch.ones(3)
    cache.cached("name", (a,), work)
    assert [kept.data_ptr() for kept in entries()] == [a.data_ptr()]
    b = torch.ones(3)
    cache.cached("name", (b,), work)
    assert [kept.data_ptr() for kept in entries()] == [b.data_ptr()]


def test_what_is_kept_holds_no_graph():
    cache = TensorCache()
    leaf = torch.ones(3, requires_grad=True)
    cache.cached("name", (leaf * 2,), Counter())
    assert not any(kept.requires_grad for _, tensors in cache._entries.values() for kept in tensors)


def test_the_least_recently_used_entry_goes_first():
    cache, work = TensorCache(2), Counter()
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    cache.cached("n", (a,), work)
    cache.cached("n", (b,), work)
    cache.cached("n", (a,), work)  # a is now the more recent one
    cache.cached("n", (c,), work)
    assert work.calls == 3
    cache.cached("n", (a,), work)
    assert work.calls == 3
    cache.cached("n", (b,), work)
    assert work.calls == 4


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_entries_than_its_size(size):
    cache, work = TensorCache(size), Counter()
    tensors = [torch.ones(k + 1) for k in range(6)]
    for tensor in tensors:
        cache.cached("n", (tensor,), work)
        assert len(cache._entries) <= size


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_start_empty_and_keep_the_size(duplicate):
    cache, work = TensorCache(2), Counter()
    a = torch.ones(3)
    cache.cached("n", (a,), work)
    other = duplicate(cache)
    assert isinstance(other, TensorCache)
    other.cached("n", (a,), work)
    assert work.calls == 2
    for size in (4, 5, 6):
        other.cached("n", (torch.ones(size),), work)
    assert len(other._entries) == 2
    cache.cached("n", (a,), work)  # the original keeps its own
    assert work.calls == 5


def test_unpicklable_values_do_not_matter():
    cache = TensorCache()
    cache.cached("n", (torch.ones(1),), lambda: lambda: None)
    assert isinstance(pickle.loads(pickle.dumps(cache)), TensorCache)


def test_inference_tensors_are_never_remembered():
    cache, work = TensorCache(), Counter()
    with torch.inference_mode():
        a = torch.ones(3)
    cache.cached("n", (a,), work)
    cache.cached("n", (a,), work)
    assert work.calls == 2
    cache.cached("n", (torch.ones(2), a), work)
    assert work.calls == 3
    assert not cache._entries


def test_ordinary_tensors_are_remembered_in_inference_mode():
    cache, work = TensorCache(), Counter()
    a = torch.ones(3)
    with torch.inference_mode():
        cache.cached("n", (a,), work)
        cache.cached("n", (a,), work)
    assert work.calls == 1


def test_nothing_is_remembered_of_a_failure():
    cache, work = TensorCache(), Counter()
    a = torch.ones(3)

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.cached("n", (a,), fail)
    cache.cached("n", (a,), work)
    assert work.calls == 1


def test_work_may_use_the_memo_itself():
    cache, work = TensorCache(), Counter()
    a = torch.ones(3)
    outer = cache.cached("outer", (a,), lambda: ("outer", cache.cached("inner", (a,), work)))
    assert outer == ("outer", ("value", 1))
    assert cache.cached("inner", (a,), work) == ("value", 1)
