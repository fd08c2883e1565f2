"""Wait for what the outside brings about and tells nobody of: for no longer than a busy machine may take."""

import asyncio
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.002


async def eventually(holds: Callable[[], object], what: str = "the condition") -> None:
    """Return once `holds()`. Fails after PATIENCE_S, naming it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"{what} does not come about") from None
