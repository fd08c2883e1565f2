"""An event loop on virtual time: when all coroutines wait, time jumps ahead, so minutes take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Skips each wait and adds its length to the virtual time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "every coroutine waits for ever"
            self.now_s += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, for coroutines that use no sockets."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._skipping.now_s


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
