"""Who has what, and what goes between ranks."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_gaps import distributed
from gpytorch_gaps.distributed.communicator import Communicator, Traffic, split_evenly
from gpytorch_gaps.utils.progress import format_bytes
from tests._ranks import run_ranks
from tests.distributed import _work as work

WORK = "tests.distributed._work"


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 30))
def test_shares_are_all_and_nothing_twice(size, count, multiple):
    parts = split_evenly(size, count, multiple)
    assert len(parts) == count
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    lengths = [part.stop - part.start for part in parts]
    cut_at = multiple if -(-size // multiple) >= count else 1
    assert max(lengths) - min(lengths) <= 2 * cut_at - 1 or multiple == 1
    assert all(part.start % cut_at == 0 for part in parts if part.start < size)
    if size >= count:
        assert min(lengths) > 0


def test_one_process_sends_nothing():
    ranks = Communicator()
    x = torch.ones(3)
    assert ranks.sum(x, "sums") is x
    assert ranks.from_main(2.0, torch.device("cpu"), "numbers") == 2.0
    assert ranks.gather("a", "words") == ["a"]
    assert ranks.run_on_all("work", lambda: 5) == 5
    assert ranks.exchange([x], [(3,)], "transposes")[0] is x
    ranks.require_same({"noise": 1.0})
    assert ranks.traffic.total == 0
    assert ranks.is_main
    with pytest.raises(OSError, match="gone"):
        ranks.run_on_all("work", lambda: (_ for _ in ()).throw(OSError("gone")))


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_sent_arrives(count):
    for rank, found in enumerate(run_ranks(count, WORK, "collectives")):
        assert found["sum"] == [count * (count + 1) / 2] * 3
        assert found["exchanged"] == [[[10.0 * other + rank] * 2] * (rank + 1) for other in range(count)]
        assert found["number"] == 0.0
        assert found["gathered"] == list(range(count))
        assert found["bytes"]["sums"] == 24
        assert found["bytes"]["words"] > 0
        assert found["bytes"]["transposes"] == 4 * 2 * count * (count + 1) // 2
        assert "sums: 1 x 24 B" in found["text"]


def test_a_group_that_is_none_of_ours():
    with pytest.raises(ValueError, match=r"group: got one without torch\.distributed being initialised"):
        Communicator(object())


def test_without_a_launcher_there_is_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with distributed.process_group() as group:
        assert (group.rank, group.size, group.is_main, group.group) == (0, 1, True, None)
        assert Communicator(group).size == 1


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "60", None, True])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ValueError, match="process_group: timeout: got"), distributed.process_group(timeout=timeout):
        pass


def test_a_rank_that_never_comes(monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "0")
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(distributed.RankError, match=r"rank 0 of 2: the others .* did not all join within 1 s"),
        distributed.process_group(timeout=1.0),
    ):
        pass


def test_traffic_in_words():
    traffic = Traffic()
    assert str(traffic) == "nothing"
    traffic.add("sums", 4096)
    traffic.add("sums", 4096)
    assert str(traffic) == "sums: 2 x 4 KiB"
    assert traffic.total == 8192
    assert [format_bytes(n) for n in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2 KiB", "3 MiB", "5 GiB"]


@pytest.mark.parametrize("what", ["other type", "not a member"])
def test_groups_that_are_none(what):
    for said in run_ranks(2, WORK, "wrong_group", what):
        expected = {"other type": "group: got str, expected a group", "not a member": "this process is not a member"}
        assert expected[what] in said or said == "member"


def test_groups_one_after_the_other():
    """Ranks that come late must not find the addresses of the group before."""
    assert run_ranks(2, WORK, "groups_in_turn") == [[3.0, 3.0, 3.0]] * 2


def test_a_process_among_others_that_has_no_group_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="reconstruct: torchrun has started 4 processes, and each does all"):
        work.solve(None, (6, 5))
    monkeypatch.setenv("RANK", "1")
    work.solve(None, (6, 5))


def test_a_group_that_has_ended():
    assert all("the process group has ended" in said for said in run_ranks(2, WORK, "after_the_end"))
