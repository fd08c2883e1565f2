"""Run work on prompts beside the event loop, fairly over tenants."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kelvin.process.fair_lock import FairLock

T = TypeVar("T")

# Longer prompts are rendered and encoded in a thread, one at a time: a megabyte takes tenths of a second.
# For a short chat, a template may use its whole budget on the event loop, about a second. That only slows replicas
# of its own version.
INLINE_CHARACTERS: Final = 4096
_MAX_WAITING: Final = 1024  # bounds memory; deadlines bound the wait
_MAX_WAITING_OF_TENANT: Final = 256


class EncodingQueue:
    """The executor of work on prompts: short ones run at once, long ones in one thread, round-robin over tenants.

    So prompts take at most one core from the engine. A tenant waits for at most one prompt of each other tenant.
    """

    def __init__(self, max_inline_size: int = INLINE_CHARACTERS) -> None:
        """Work of a size above `max_inline_size` runs in the thread."""
        self._max_inline_size = max_inline_size
        self._executor = ThreadPoolExecutor(1, "encode")
        self._lock = FairLock("the queue of long inputs", _MAX_WAITING, _MAX_WAITING_OF_TENANT)

    @property
    def waiting(self) -> int:
        """Return how many prompts wait for the thread."""
        return self._lock.waiting

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises its exception, and `Refused(Overloaded)` at once if too many wait."""
        if size <= self._max_inline_size:
            return work()
        async with self._lock.hold(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
