"""Ask again and again, and more and more seldom, for what tells nobody that it has come to be so."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

POLL_S: Final = 0.02
SELDOM_S: Final = 0.2
_SLOWER: Final = 1.25


def comes(holds: Callable[[], bool], limit_s: float, seldom_s: float = SELDOM_S) -> bool:
    """Whether it came to hold within so long. See `remaining`."""
    return not remaining(lambda: not holds(), limit_s, seldom_s)


def remaining(amiss: Callable[[], T], limit_s: float, seldom_s: float = SELDOM_S) -> T:
    """What is `amiss` still, after so long at the most: asked at once, and until nothing is (what it says is false).

    `seldom_s` is the longest pause between two looks. Raises what `amiss` raises, and does not cut it short.
    """
    limit, pause_s = time.monotonic() + limit_s, POLL_S
    while (found := amiss()) and time.monotonic() < limit:
        time.sleep(pause_s)
        pause_s = min(_SLOWER * pause_s, seldom_s)  # what takes long is not looked at by a core of its own
    return found
