"""Tests that calls which may never return are waited for in bounded time."""

import threading

import pytest
import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import CallThread, call_within, on_own_thread
from tests.deadline import LIMIT


def test_a_bounded_call_returns_the_result_or_raises_the_error():
    assert call_within(LIMIT, "some-thread", lambda: threading.current_thread().name) == "some-thread"

    def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_within(LIMIT, "some-thread", fail)


def test_a_call_that_does_not_return_is_abandoned():
    may_return = threading.Event()
    with pytest.raises(TimeoutError, match=r"has not returned in 0\.01 s"):
        call_within(0.01, "some-thread", may_return.wait)
    called = on_own_thread("other-thread", may_return.wait)
    may_return.set()
    assert called.result(LIMIT)


def test_calls_of_one_thread_are_made_in_order_and_none_after_its_end():
    thread, may_return, made = CallThread("coordinator-calls"), threading.Event(), []
    first = thread.begin(lambda: may_return.wait(LIMIT) and made.append(threading.get_ident()))
    failing = thread.begin(lambda: made.index("missing"))
    last = thread.begin(lambda: made.append(threading.get_ident()))
    thread.end()
    with pytest.raises(tf.errors.CancelledError):
        thread.begin(made.clear)
    may_return.set()
    first.result(LIMIT)
    with pytest.raises(ValueError, match="missing"):
        failing.result(LIMIT)
    last.result(LIMIT)
    assert len(made) == 2
    assert len({*made, threading.get_ident()}) == 2
