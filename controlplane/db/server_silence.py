"""Stop waiting for a database server that has sent nothing for too long.

A stalled server keeps its connections open, and its kernel acknowledges packets. So neither keepalives nor
`tcp_user_timeout` end the wait, and only the server itself enforces a statement's timeout. The client has to measure.

The limit is for silence, not for work: each answer of the server restarts it. A database call runs on one thread, so
the state is per thread.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from controlplane import dependencies

CANCEL_S: Final = 1.0  # for asking the server to cancel the statement
LIMIT_S = dependencies.DATABASE.timeout_s - CANCEL_S


class ServerSilent(TimeoutError):
    """The server has sent nothing for too long."""


class _ThreadSilence(threading.local):
    def __init__(self) -> None:
        self.limit_s = math.inf
        self.since_s = 0.0
        self.is_silent = False  # a wait was given up, and no answer has come since


_silence: Final = _ThreadSilence()


@contextmanager
def limit_silence(limit_s: float, queued_at_s: float | None = None) -> Iterator[None]:
    """Limit waits of this thread to `limit_s` seconds of silence. A lower limit of an outer block stays.

    `queued_at_s` (monotonic) is when the call was queued for this thread. While the server is silent, silence counts
    from there, so that queued calls do not each wait the full limit. Raises ServerSilent at once if that is already too
    long.
    """
    before_s = _silence.limit_s
    _silence.limit_s = min(before_s, limit_s)
    try:
        if queued_at_s is not None and _silence.is_silent:
            _silence.since_s = max(_silence.since_s, queued_at_s)
            check()
        yield
    finally:
        _silence.limit_s = before_s


def start_silence() -> None:
    """Start measuring silence: from here on this thread waits for the server."""
    if not _silence.is_silent:
        _silence.since_s = time.monotonic()


def record_answer() -> None:
    """Record that the server has sent something."""
    _silence.since_s, _silence.is_silent = time.monotonic(), False


def remaining_s() -> float:
    """Return how many more seconds this thread may wait; infinite without a limit."""
    return _silence.limit_s - (time.monotonic() - _silence.since_s)


def check() -> None:
    """Raise ServerSilent if this thread has waited for too long."""
    if remaining_s() <= 0:
        give_up()
        raise ServerSilent("the server does not answer")


def give_up() -> None:
    """Record that a wait was given up."""
    _silence.is_silent = True
