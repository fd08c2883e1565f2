"""Poll for what nobody tells: at once, then after pauses that grow."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.2
_BACKOFF_FACTOR: Final = 1.25


def poll_until_true(holds: Callable[[], bool], limit_s: float, seldom_s: float = MAX_POLL_S) -> bool:
    """Poll `holds` for `limit_s`, and return whether it came to hold. See `remaining`."""
    return not remaining(lambda: not holds(), limit_s, seldom_s)


def remaining(amiss: Callable[[], T], limit_s: float, seldom_s: float = MAX_POLL_S) -> T:
    """Poll `amiss` until it returns something false, for `limit_s` at the most, and return what it returned last.

    `seldom_s` is the longest pause between two calls. Raises what `amiss` raises. A call is not cut short.
    """
    limit, pause_s = time.monotonic() + limit_s, POLL_S
    while (found := amiss()) and time.monotonic() < limit:
        time.sleep(pause_s)
        pause_s = min(_BACKOFF_FACTOR * pause_s, seldom_s)  # what takes long is not looked at by a core of its own
    return found
