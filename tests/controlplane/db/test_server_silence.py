"""A thread waits for a silent server once, not once for each queued call."""

import time

import pytest

from controlplane.db import server_silence
from controlplane.dependencies import DATABASE

SHIPPED_LIMIT_S = server_silence.LIMIT_S


def test_limit_and_cancellation_fit_the_promise() -> None:
    """The two add up to the timeout in the table of dependencies."""
    assert DATABASE.timeout_s == SHIPPED_LIMIT_S + server_silence.CANCEL_S


def test_calls_in_line_wait_once_for_a_silent_server() -> None:
    """While the server is silent, a call's time counts from when it was queued. An answer resets that, and work between
    two waits is no silence.
    """
    now_s = time.monotonic()
    with server_silence.limit_silence(4.0, queued_at_s=now_s - 50):
        server_silence.start_silence()
        assert server_silence.remaining_s() > 3.0
        server_silence.give_up()
    with pytest.raises(server_silence.ServerSilent), server_silence.limit_silence(1e-9, queued_at_s=now_s - 50):
        pass
    server_silence.record_answer()
    with server_silence.limit_silence(4.0, queued_at_s=now_s - 50):
        server_silence.start_silence()
        assert server_silence.remaining_s() > 3.0


def test_lower_limit_that_holds_already_stays() -> None:
    """A nested limit cannot extend the call's limit. Without a call there is no limit."""
    assert server_silence.remaining_s() == float("inf")
    with server_silence.limit_silence(2.0, queued_at_s=time.monotonic()), server_silence.limit_silence(4.0):
        server_silence.start_silence()
        assert server_silence.remaining_s() <= 2.0
    assert server_silence.remaining_s() == float("inf")
