"""Poll for a condition without a notification: at once, then after growing pauses."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.2
_BACKOFF_FACTOR: Final = 1.25


def poll_until_true(is_true: Callable[[], bool], limit_s: float, seldom_s: float = MAX_POLL_S) -> bool:
    """Poll `is_true` for at most `limit_s`. Return whether it became true. See `remaining`."""
    return not remaining(lambda: not is_true(), limit_s, seldom_s)


def remaining(find_problems: Callable[[], T], limit_s: float, seldom_s: float = MAX_POLL_S) -> T:
    """Poll `find_problems` until it returns a false value, for at most `limit_s`, and return its last value. `seldom_s`
    is the longest pause between two calls. Raises what `find_problems` raises. A call is not cut short.
    """
    limit, pause_s = time.monotonic() + limit_s, POLL_S
    while (found := find_problems()) and time.monotonic() < limit:
        time.sleep(pause_s)
        pause_s = min(_BACKOFF_FACTOR * pause_s, seldom_s)  # long waits must not use up a core
    return found
