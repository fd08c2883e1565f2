"""Range reads in threads that are given up at once, though a thread may have to wait for an endpoint's silence to end.

A read that is told to end while its body arrives is interrupted, and waited for: it has the caller's memory. One that
waits for an answer's head can't be, but will not touch the memory any more: it is left to its thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from blobstore.s3_reads import Halt

T = TypeVar("T")

STRAYS: Final = 8  # are left to themselves at once: they take up threads of the store


class RangeCalls:
    """Runs calls that each read under a `Halt`."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._strays: set[Future[object]] = set()

    def __repr__(self) -> str:
        return f"<RangeCalls strays={len(self._strays)}>"

    async def run(self, calls: Sequence[Callable[[], T]], halt: Halt) -> list[T]:
        """The results, in order. Once one raises or the caller is cancelled, the others are halted; when this returns
        or raises, nothing writes to the memory of any. Of several errors the first is raised.
        """
        futures = [self._threads.submit(call) for call in calls]
        works = [asyncio.wrap_future(future) for future in futures]
        failure: BaseException | None = None
        running = set(works)
        while running and not (failure is not None and self._may_leave(halt, len(running))):
            try:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                failure = error  # it matters more than what a call said
                halt.set()
                continue
            for error_of_one in [work.exception() for work in done]:  # each is seen
                if error_of_one is not None and failure is None:
                    failure = error_of_one
                    halt.set()
        if failure is None:
            return [work.result() for work in works]
        self._leave([future for future in futures if not future.done()])
        for work in running:
            work.cancel()  # nobody hears of it any more
        raise failure

    def _may_leave(self, halt: Halt, running: int) -> bool:
        return halt.is_quiet and len(self._strays) + running <= STRAYS

    def _leave(self, futures: Sequence[Future[T]]) -> None:
        for future in futures:
            stray: Future[object] = future  # type: ignore[assignment]  # a set of any kind
            self._strays.add(stray)
            stray.add_done_callback(self._strays.discard)
