"""Threads: how many, and that neither many callers nor a fork disturb a result."""

import os
import threading

import numpy as np
import pytest

import regardant as rg
from op import tensors
from regardant import threads


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setattr(threads, "_followed", None)  # torch's, once regardant.torch is there
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return monkeypatch


def test_the_count_follows_setting_then_environment_then_affinity(unset):
    assert threads.num_threads() == len(os.sched_getaffinity(0))
    unset.setenv("OMP_NUM_THREADS", "3,2")
    assert threads.num_threads() == 3
    rg.set_num_threads(5)
    assert threads.num_threads() == 5


@pytest.mark.parametrize("said", ["0", "many", "-1", "65537", "999999999999"])
def test_a_bad_environment_is_named(unset, said):
    unset.setenv("OMP_NUM_THREADS", said)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS must be a number from 1 to 65536; got '{said}'"):
        threads.num_threads()


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (2**31, ValueError), (1.0, TypeError), (True, TypeError)]
)
@pytest.mark.usefixtures("unset")
def test_a_bad_count_is_refused(count, error):
    with pytest.raises(error, match="set_num_threads: count must be"):
        rg.set_num_threads(count)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.usefixtures("unset")
def test_the_same_bits_for_any_count(count):
    arrays = tensors(1, 1, 4, 2, 500, 500, 16, 16)
    want = rg.look(*arrays, received=True, pooled=(4, 4))
    rg.set_num_threads(count)
    look = rg.look(*arrays, received=True, pooled=(4, 4))
    for name in ("out", "lse", "entropy", "top_keys", "top_weights", "received", "pooled"):
        np.testing.assert_array_equal(getattr(look, name), getattr(want, name))
    np.testing.assert_array_equal(look.rows(range(500)), want.rows(range(500)))


@pytest.mark.usefixtures("unset")
def test_an_error_in_one_item_is_raised():
    rg.set_num_threads(2)

    def fail(item):
        if item == 3:
            raise RuntimeError("item 3")

    with pytest.raises(RuntimeError, match="item 3"):
        threads.each(fail, list(range(6)))


def test_eight_callers_at_once():
    arrays = tensors(2, 1, 4, 2, 300, 300, 16, 16)
    want = rg.attention(*arrays)
    got = [None] * 8

    def call(i):
        got[i] = rg.attention(*arrays)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for out in got:
        np.testing.assert_array_equal(out, want)
