"""What the connection of a request tells of its client, over HTTP/1.1 and HTTP/2 alike: it has all, or it has gone."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable


class Client(ABC):
    """`_taken` is set by whoever is one, each time that something left, and when the client goes."""

    _taken: asyncio.Event
    _gone: Callable[[], None] | None = None

    @abstractmethod
    def is_here(self) -> bool:
        """Whether the client can be told anything more."""

    @abstractmethod
    def is_accepted(self) -> bool:
        """Whether the socket has taken all of the answer so far, and the client is there."""

    async def accepted(self) -> bool:
        """Wait until it has; False where the client has gone."""
        while self.is_here():
            if self.is_accepted():
                return True
            self._taken.clear()
            await self._taken.wait()
        return False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once if the client goes before the answer is complete."""
        self._gone = gone

    def unwatch(self, gone: Callable[[], None] | None = None) -> None:
        """The request is over, or nobody needs to be told; with `gone` that one, and not who watches by now."""
        if gone is None or gone == self._gone:
            self._gone = None

    def _went(self, *, is_answered: bool) -> None:
        """The client has gone; who watches is told unless it had all."""
        gone, self._gone = self._gone, None
        if gone is not None and not is_answered:
            gone()
