"""How often a pod is asked whether it takes requests: soon at first, and never so late that a start is much longer."""

from typing import Final

FIRST_S: Final = 0.025
LAST_S: Final = 1.0
SHARE: Final = 0.02  # of the time that it has been asked for


def pause_s(asked_s: float) -> float:
    """Until the next time, of one that has been asked for so long: a start is seen to be over 2 % late, on a short one
    25 ms. Seconds.
    """
    return min(LAST_S, max(FIRST_S, asked_s * SHARE))
