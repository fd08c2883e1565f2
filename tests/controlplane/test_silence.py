"""A thread waits for a silent server once, not once for each call that stands in line for it."""

import time

import pytest

from controlplane import silence
from controlplane.dependencies import DATABASE

SHIPPED_LIMIT_S = silence.LIMIT_S


def test_limit_and_cancellation_fit_the_promise() -> None:
    """The two together are what the table of dependencies promises."""
    assert DATABASE.timeout_s == SHIPPED_LIMIT_S + silence.CANCEL_S


def test_calls_in_line_wait_once_for_a_silent_server() -> None:
    """While it is silent, the time of each counts from when it was made. An answer gives all of it again, and what a
    thread does between two waits is not the server's silence.
    """
    now_s = time.monotonic()
    with silence.limit_silence(4.0, queued_at_s=now_s - 50):
        silence.start_silence()
        assert silence.remaining_s() > 3.0
        silence.give_up()
    with pytest.raises(silence.ServerSilent), silence.limit_silence(1e-9, queued_at_s=now_s - 50):
        pass
    silence.record_answer()
    with silence.limit_silence(4.0, queued_at_s=now_s - 50):
        silence.start_silence()
        assert silence.remaining_s() > 3.0


def test_lower_limit_that_holds_already_stays() -> None:
    """What is done within a call has no more time than the call, and without a call there is no limit."""
    assert silence.remaining_s() == float("inf")
    with silence.limit_silence(2.0, queued_at_s=time.monotonic()), silence.limit_silence(4.0):
        silence.start_silence()
        assert silence.remaining_s() <= 2.0
    assert silence.remaining_s() == float("inf")
