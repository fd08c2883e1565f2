"""How many requests begin in one round of the loop: those beyond stand here until the next, each credential's in the
order in which they came, and the credentials in turn: whose connections were accepted first is not ahead of others.

A loop that is behind finds hundreds of them at once. Would it begin them all before it looks at its sockets again, then
replicas' answers waited behind them, and with these the slots that others wait for: the more came, the less was done.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

ROUND: Final = 8  # a millisecond or so of them


class Porch:
    """Of one event loop."""

    def __init__(self, most: int = ROUND) -> None:
        self._most = most
        self._left = most  # of this round
        self._waiting: OrderedDict[bytes, deque[Callable[[], object]]] = OrderedDict()
        self._count = 0

    def __repr__(self) -> str:
        return f"<Porch waiting={self._count}>"

    def enter(self, begin: Callable[[], object], whose: bytes = b"") -> None:
        """Call it: now, or in one of the next rounds. `whose` is a credential as it came, good or not."""
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._left:
            self._left -= 1
            begin()
        else:
            self._waiting.setdefault(whose, deque()).append(begin)
            self._count += 1

    def _next_round(self) -> None:
        some = [self._next() for _ in range(min(self._most, self._count))]
        self._left = self._most - len(some)
        if some:
            asyncio.get_running_loop().call_soon(self._next_round)
        for begin in some:
            begin()

    def _next(self) -> Callable[[], object]:
        whose, line = next(iter(self._waiting.items()))
        if len(line) == 1:
            del self._waiting[whose]
        else:
            self._waiting.move_to_end(whose)
        self._count -= 1
        return line.popleft()
