"""Poll for a change that no event announces, with a deadline that fits a busy machine."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.002
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1


async def eventually(holds: Callable[[], object], what: str = "the condition") -> None:
    """Return once `holds()` is true. Fails after PATIENCE_S and names the condition."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"{what} does not come about") from None


def wait(is_so: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Block until `is_so()` is true. Fails after `limit_s` and names `what`.
    Pauses grow, because other processes need the cores.
    """
    limit, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while not is_so():
        assert time.monotonic() < limit, f"after {limit_s:g} s it is not so that {what}"
        time.sleep(pause_s)
        pause_s = min(1.25 * pause_s, _LONGEST_PAUSE_S)
