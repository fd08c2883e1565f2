"""Give up on a database server that says nothing.

A server that stalls keeps its connections open, and the kernel acknowledges what it is sent. So neither keepalives nor
`tcp_user_timeout` end the wait, and a statement's timeout is the server's own to heed. The client has to measure.

The limit is for silence, not for work: each answer of the server starts it again. A database call runs on one thread,
so the measure belongs to the thread.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from controlplane import dependencies

CANCEL_S: Final = 1.0  # to ask the server to cancel the statement that was given up
LIMIT_S = dependencies.DATABASE.timeout_s - CANCEL_S


class Silent(TimeoutError):
    """The server has said nothing for too long."""


class _Silence(threading.local):
    def __init__(self) -> None:
        self.limit_s = math.inf
        self.since_s = 0.0
        self.is_silent = False  # it was given up, and has not been heard since


_silence: Final = _Silence()


@contextmanager
def within(limit_s: float, asked_s: float | None = None) -> Iterator[None]:
    """Have this thread give up after `limit_s` seconds of silence; a lower limit that holds already stays.

    `asked_s` (monotonic) is when a call was made that has waited for this thread. While the server is silent the time
    counts from there, so that calls in line do not each wait anew. Raises Silent where it is over already.
    """
    before_s = _silence.limit_s
    _silence.limit_s = min(before_s, limit_s)
    try:
        if asked_s is not None and _silence.is_silent:
            _silence.since_s = max(_silence.since_s, asked_s)
            check()
        yield
    finally:
        _silence.limit_s = before_s


def begin() -> None:
    """Begin to wait for the server: what this thread did until now was not the server's silence."""
    if not _silence.is_silent:
        _silence.since_s = time.monotonic()


def heard() -> None:
    """Record that the server has answered this thread."""
    _silence.since_s, _silence.is_silent = time.monotonic(), False


def left_s() -> float:
    """Return the seconds for which this thread still waits; infinite where it has no limit."""
    return _silence.limit_s - (time.monotonic() - _silence.since_s)


def check() -> None:
    """Raises Silent where this thread has waited for long enough."""
    if left_s() <= 0:
        give_up()
        raise Silent("the server does not answer")


def give_up() -> None:
    """Record that the server was silent for too long."""
    _silence.is_silent = True
