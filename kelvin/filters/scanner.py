"""Scan texts on one thread that tenants share in time slices.

A scan takes from microseconds to seconds, depending on the text's digits and the tenant's rules. So it runs in steps
(see `scan_steps`), and after SLICE_S it gives the thread to another waiting tenant. However much other tenants have to
scan, a short text waits for at most one slice of each.
"""

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.artifacts.filter_api import FilterRequest, TextResult
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.filters.pii import scan_steps
from kelvin.process.fair_lock import FairLock

SLICE_S: Final = 0.005
MAX_WAITING: Final = 256  # bounds memory; deadlines bound the wait
MAX_WAITING_OF_TENANT: Final = 64


@dataclass(slots=True, eq=False)
class _Scan:
    """The scan of one request. Use it from one thread at a time."""

    steps: Generator[None, None, tuple[TextResult, ...]]
    is_cancelled: bool = False
    result: tuple[TextResult, ...] = ()

    def run_slice(self) -> bool:
        """Scan for SLICE_S. Return whether the scan is complete."""
        ends_s = time.monotonic() + SLICE_S
        while not self.is_cancelled and time.monotonic() < ends_s:
            try:
                next(self.steps)
            except StopIteration as end:
                self.result = end.value
                return True
        return False


class Scanner:
    """Runs scans. Use it on one event loop. The executor has one thread, because more would share one interpreter."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = FairLock("the filters' queue", MAX_WAITING, MAX_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<Scanner {self._lock!r}>"

    async def scan(self, tenant: str, question: FilterRequest, timeout_s: float) -> tuple[TextResult, ...]:
        """Return the findings in each text of `question`. A cancelled scan ends after its current step. Raises
        `Refused`: Overloaded at once if the queue is full, DeadlineExceeded.
        """
        loop, scan = asyncio.get_running_loop(), _Scan(_scan_all(question))
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    async with self._lock.hold(tenant):
                        if await loop.run_in_executor(self._executor, scan.run_slice):
                            return scan.result
        except TimeoutError:
            raise Refused(DeadlineExceeded(timeout_s, "looking at a text")) from None
        finally:
            scan.is_cancelled = True


def _scan_all(question: FilterRequest) -> Generator[None, None, tuple[TextResult, ...]]:
    looked: list[TextResult] = []
    for text in question.texts:
        looked += [(yield from scan_steps(text, question.rules, question.whole))]
        yield  # a short text is one step, and a request may have thousands of them
    return tuple(looked)
