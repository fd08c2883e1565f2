"""Texts that take long, looked at beside the loop: one at a time, and none for longer than who asked waits for it."""

import asyncio
import time
from concurrent.futures import Executor
from math import inf
from typing import Final

from contracts.errors import Refused
from contracts.filters import Looked, Question
from contracts.traffic_errors import DeadlineExceeded, Overloaded
from filters.look import look

MAX_WAITING: Final = 256  # a bound of memory: for how long they wait, who asks says
RETRY_AFTER_S: Final = 1.0


class LongTexts:
    """One event loop's. The executor has one thread: each takes the interpreter from whoever asks about a token."""

    def __init__(self, executor: Executor, max_waiting: int = MAX_WAITING) -> None:
        self._executor = executor
        self._max_waiting = max_waiting
        self._turn = asyncio.Lock()
        self._inside = 0  # the one that is looked at, and those that wait

    def __repr__(self) -> str:
        return f"<LongTexts inside={self._inside}/{self._max_waiting + 1}>"

    async def look(self, question: Question, within_s: float) -> tuple[Looked, ...]:
        """In its turn. Raises Refused: Overloaded, at once, where too many wait; DeadlineExceeded. Who gives up is not
        looked at, or no further than the segment that it was at.
        """
        if self._inside > self._max_waiting:
            raise Refused(Overloaded("the filters' queue", self._max_waiting, RETRY_AFTER_S))
        ends_s = time.monotonic() + within_s
        self._inside += 1
        try:
            async with asyncio.timeout(within_s), self._turn:
                return await asyncio.get_running_loop().run_in_executor(
                    self._executor, look_at_all, question, ends_s
                )  # what has not begun by then is taken out of the executor
        except TimeoutError:
            raise Refused(DeadlineExceeded(within_s, "looking at a text")) from None
        finally:
            self._inside -= 1


def look_at_all(question: Question, ends_s: float = inf) -> tuple[Looked, ...]:
    """Each text of it, until then (monotonic). Raises TimeoutError."""

    def check() -> None:
        if time.monotonic() >= ends_s:
            raise TimeoutError

    return tuple(look(text, question.rules, question.whole, check) for text in question.texts)
