"""Limit how many requests start in one iteration of the event loop.

After a stall, hundreds of requests are readable at once. Starting them all would delay replies from replicas, which
free the slots that other requests wait for, so throughput would fall as load rises. Requests above the limit wait in a
queue and start in later iterations.

The queue is round-robin over client addresses, then over credentials of one address, then first come, first served.
"""

import asyncio
from collections import OrderedDict, deque
from typing import Final, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")
ROUND: Final = 8  # a millisecond or so of them


class Guest(Protocol):
    """A request. Nothing of it is asked where it need not wait."""

    @property
    def source(self) -> str | None:
        """Whom it counts for by its address; None: one of our own."""
        ...

    def credential(self) -> bytes:
        """As it came, good or not."""
        ...

    def try_begin(self) -> bool:
        """Have it served; False of one whose client has left, which takes nobody's place. Called once, or `refuse`."""
        ...

    def refuse(self) -> None:
        """Answer it here: it is served no more."""
        ...


class Porch:
    """Of one event loop."""

    def __init__(self, most: int = ROUND) -> None:
        self._most = most
        self._left = most  # of this round
        self._lines: OrderedDict[str | None, OrderedDict[bytes, deque[Guest]]] = OrderedDict()
        self._count = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Porch waiting={self._count}{' closed' if self._is_closed else ''}>"

    def enter(self, guest: Guest) -> None:
        """Begin it now, or in one of the next rounds."""
        if self._is_closed:
            guest.refuse()
            return
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._left:
            self._left -= 1
            guest.try_begin()
        else:
            lines = self._lines.setdefault(guest.source, OrderedDict())
            lines.setdefault(guest.credential(), deque()).append(guest)
            self._count += 1

    def close(self) -> None:
        """The time to serve anybody is over: who waits is refused, and so is whoever comes."""
        self._is_closed = True
        while self._count:
            self._next().refuse()

    def _next_round(self) -> None:
        self._left = self._most
        if self._count:
            asyncio.get_running_loop().call_soon(self._next_round)
        while self._left and self._count:
            self._left -= self._next().try_begin()

    def _next(self) -> Guest:
        source, lines = next(iter(self._lines.items()))
        credential, line = next(iter(lines.items()))
        guest = line.popleft()
        self._count -= 1
        _turn(lines, credential, is_empty=not line)
        _turn(self._lines, source, is_empty=not lines)
        return guest


def _turn(lines: OrderedDict[K, V], whose: K, *, is_empty: bool) -> None:
    """It was their turn: they are the last now, where they have more."""
    if is_empty:
        del lines[whose]
    else:
        lines.move_to_end(whose)
