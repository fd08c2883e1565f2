"""Send a spool's records in order, at least once. The receiver makes repeats harmless.

Acknowledged records are removed. No other record is ever removed, whatever the receiver responds.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Self

from kelvin.contracts.backoff import ExponentialBackoff, should_log
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused
from kelvin.process.loops import Loops, record_error
from kelvin.process.thread_calls import run_uncancellable
from kelvin.spool.spool import Spool

log = logging.getLogger(__name__)

Post = Callable[[Sequence[bytes]], Awaitable[None]]

MAX_RECORDS: Final = 500
MAX_BYTES: Final = 1024 * 1024


class Shipper:
    """Ships one spool. `async with` ships in the background; `flush` also works without that.

    `post` gets records in order, returns once the receiver has them durably, and must end by itself. If it raises
    Refused or OSError, the same records are posted again after an exponential back-off up to `max_backoff_s`, with
    jitter. Any other error is a defect: it ends `run`, and its loop starts `run` again.
    """

    def __init__(
        self,
        spool: Spool,
        post: Post,
        *,
        linger_s: float = 0.05,
        backoff_s: float = 0.1,
        max_backoff_s: float = 10.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._spool = spool
        self._post = post
        self._linger_s = linger_s
        self._backoff = ExponentialBackoff(backoff_s, max_backoff_s)
        self._jitter = jitter
        self._one_at_a_time = asyncio.Lock()
        self._committed = asyncio.Event()
        self._loops = Loops()
        self.failures = 0  # consecutive failures; 0 while the receiver accepts records

    def __repr__(self) -> str:
        return f"<Shipper {self._spool.source} backlog={self.backlog} failures={self.failures}>"

    @property
    def backlog(self) -> int:
        """Return the number of durable records that the receiver has not acknowledged."""
        return self._spool.committed - self._spool.tail.acknowledged

    async def __aenter__(self) -> Self:
        self._loops.start("shipper", self.run, about=self._spool.source)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._loops.close()

    async def run(self) -> None:
        """Ship until cancelled. Before a batch that is not full, pause so that records gather in one post."""
        unsubscribe = self._spool.subscribe(self._committed.set)
        try:
            while True:
                self._committed.clear()
                if self.backlog == 0:
                    await self._committed.wait()
                if self.backlog < MAX_RECORDS:
                    await asyncio.sleep(self._linger_s)
                if not await self._try_ship():
                    await asyncio.sleep(self._pause_s())
        finally:
            unsubscribe()

    async def flush(self, deadline: Deadline) -> bool:
        """Ship everything that is durable now. Return whether that succeeded before the deadline."""
        target = self._spool.committed
        try:
            async with asyncio.timeout(deadline.remaining_s(time.monotonic())):
                while self._spool.tail.acknowledged < target:
                    if not await self._try_ship():
                        await asyncio.sleep(self._pause_s())
        except TimeoutError:
            return False
        except Exception as error:  # a drain must continue with its other steps
            record_error(error, self._spool.source)
            return False
        return True

    async def _try_ship(self) -> bool:
        """Post one batch. Return False if the receiver or the disk refuses. Other errors are defects, and raised."""
        async with self._one_at_a_time:
            try:
                tail = self._spool.tail
                batch = await run_uncancellable(None, tail.read, self._spool.committed, MAX_RECORDS, MAX_BYTES)
                if batch is not None:
                    await self._post(batch.payloads)
                    await run_uncancellable(None, tail.acknowledge, batch.last)
                elif self.backlog:
                    # Damage at the end of the written records. Once there is a next segment, reading continues after
                    # the gap.
                    raise OSError("durable records cannot be read back")
            except (Refused, OSError) as error:
                self.failures += 1
                if should_log(self.failures):
                    log.warning(
                        "records could not be shipped; they are kept",
                        extra={"source": self._spool.source, "error": repr(error), "failures": self.failures},
                    )
                return False
            self.failures = 0
            return True

    def _pause_s(self) -> float:
        # Between this step and the next of the back-off: 0.1 to 0.2 s after the first failure.
        return self._backoff.delay_s(self.failures + 1, 1 - self._jitter())
