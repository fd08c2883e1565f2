"""Share the one thread that looks at texts among tenants: each has it for some milliseconds at a time, in turn.

Looking at a text takes from microseconds to seconds: its digits and its owner's rules decide. So a text is looked at
in steps, and after SLICE_S the thread goes to another tenant, if one waits. However much a tenant asks, another one's
short text waits for one slice of each tenant that asks.
"""

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from contracts.errors import Refused
from contracts.filters import Looked, Question
from contracts.traffic_errors import DeadlineExceeded
from filters.look import look_in_steps
from service.fair_lock import FairLock

SLICE_S: Final = 0.005
MAX_WAITING: Final = 256  # a bound of memory: for how long they wait, who asks says
MAX_WAITING_OF_TENANT: Final = 64


@dataclass(slots=True, eq=False)
class _Look:
    """One question on its way. Used by one thread at a time."""

    steps: Generator[None, None, tuple[Looked, ...]]
    is_over: bool = False  # nobody waits for it any more
    found: tuple[Looked, ...] = field(default=())

    def go_on(self) -> bool:
        """Look for a slice; whether all of it is looked at."""
        ends_s = time.monotonic() + SLICE_S
        while not self.is_over and time.monotonic() < ends_s:
            try:
                next(self.steps)
            except StopIteration as end:
                self.found = end.value
                return True
        return False


class Sharing:
    """One event loop's. The executor has one thread: more of them would share one interpreter."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = FairLock("the filters' queue", MAX_WAITING, MAX_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<Sharing {self._lock!r}>"

    async def look(self, tenant: str, question: Question, within_s: float) -> tuple[Looked, ...]:
        """Look at each text of `question`. Raises `Refused`: Overloaded, at once, where too many wait;
        DeadlineExceeded. What nobody waits for is looked at no further than the step that it was at.
        """
        loop, look = asyncio.get_running_loop(), _Look(_look_at_all(question))
        try:
            async with asyncio.timeout(within_s):
                while True:
                    async with self._lock.hold(tenant):
                        if await loop.run_in_executor(self._executor, look.go_on):
                            return look.found
        except TimeoutError:
            raise Refused(DeadlineExceeded(within_s, "looking at a text")) from None
        finally:
            look.is_over = True


def _look_at_all(question: Question) -> Generator[None, None, tuple[Looked, ...]]:
    looked: list[Looked] = []
    for text in question.texts:
        looked += [(yield from look_in_steps(text, question.rules, question.whole))]
    return tuple(looked)
