"""A process's durable spool: appends from any thread or event loop, one committer thread, group commit.

What is appended stays until a `Shipper` has handed it over; encoding and meaning of records are the caller's.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from kelvin.contracts.errors import Internal, Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.spool.recent_records import RECENT_BYTES, RecentRecords
from kelvin.spool.segment_disk import SegmentDisk
from kelvin.spool.segment_reader import SegmentReader
from kelvin.spool.segment_writer import LIMIT_BYTES, SEGMENT_BYTES, Make, SegmentWriter
from kelvin.spool.source_directory import SourceDirectory

log = logging.getLogger(__name__)

MAX_WAITING: Final = 4096
MAX_GROUP: Final = 512
BLOCKING_TIMEOUT_S: Final = 30.0
LINGER_ROUNDS: Final = 1  # rounds of a loop
UNAWAITED_DELAY_S: Final = 0.05  # within which what nobody waits for is on its way to the disk

Outcome = int | Exception


class _LoopWaiter:
    """An append that an event loop waits for."""

    __slots__ = ("future", "loop", "make", "outcome")

    def __init__(self, make: Make, loop: asyncio.AbstractEventLoop) -> None:
        self.make = make
        self.loop = loop
        self.future: asyncio.Future[int] = loop.create_future()
        self.outcome: Outcome = 0

    def resolve(self) -> None:
        """On the loop."""
        if self.future.done():  # cancelled: the record stays
            return
        if isinstance(self.outcome, int):
            self.future.set_result(self.outcome)
        else:
            self.future.set_exception(self.outcome)


class _ThreadWaiter:
    """An append that a thread waits for."""

    __slots__ = ("done", "make", "outcome")

    def __init__(self, make: Make) -> None:
        self.make = make
        self.done = threading.Event()
        self.outcome: Outcome = 0


class _FireAndForget:
    """An append that nobody waits for."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


Waiter = _LoopWaiter | _ThreadWaiter | _FireAndForget


class Spool:
    """Records of one source. The source names one process lifetime: never use one again."""

    def __init__(
        self,
        source_directory: SourceDirectory,
        journal: SegmentWriter,
        max_waiting: int,
        recent: RecentRecords | None = None,
    ) -> None:
        self.source = source_directory.source
        self.path = source_directory.path
        self._source_directory = source_directory
        self._journal = journal
        self._max_waiting = max_waiting
        self._committed = journal.committed
        self._failure: Unavailable | None = None
        self._lock = threading.Lock()  # over the next four
        self._waiting: list[Waiter] = []
        self._lingering: asyncio.AbstractEventLoop | None = None  # that will wake the committer
        self._closing = False
        self._is_waking_soon = False  # of the loop that appends what nobody waits for
        self._listeners: dict[int, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self.tail = SegmentReader(source_directory.path, recent)  # the shipper's
        self._thread = threading.Thread(target=self._run, name=f"spool-{self.source}", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        directory: Path,
        source: str,
        *,
        disk: SegmentDisk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        max_waiting: int = MAX_WAITING,
        recent_bytes: int = RECENT_BYTES,
    ) -> "Spool":
        """The spool `directory`/`source`. Raises OSError (BlockingIOError: a live process has it), ValueError."""
        source_directory = SourceDirectory.lock(directory, source, disk)
        try:
            recent = RecentRecords(recent_bytes)
            journal = SegmentWriter(
                source_directory.path, disk=disk, segment_bytes=segment_bytes, limit_bytes=limit_bytes, recent=recent
            )
            return cls(source_directory, journal, max_waiting, recent)
        except BaseException:
            source_directory.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<Spool {self.source} committed={self._committed} acknowledged={self.tail.acknowledged} "
            f"waiting={len(self._waiting)}{' FAILING' if self._failure else ''}>"
        )

    @property
    def committed(self) -> int:
        """The last durable sequence."""
        return self._committed

    @property
    def failure(self) -> Unavailable | None:
        """Why the last attempt to write failed, else None. Refuse new work with it: that could not be recorded."""
        return self._failure

    async def append(self, make: Make) -> int:
        """The record's sequence, once it is durable. `make(sequence)` runs on the committer's thread: keep it pure.

        Cancelling gives up the wait, not the record. After a failure nothing was recorded. Raises what `make` raises,
        ValueError for a record of illegal size, Refused(Unavailable) where the disk fails, Refused(Overloaded) where
        too many wait or too much is not yet shipped, Refused(Internal) after `close` or a defect.
        """
        loop = asyncio.get_running_loop()
        waiter = _LoopWaiter(make, loop)
        if not self._enqueue(waiter, loop):
            loop.call_soon(self._wake_after_rounds, loop, LINGER_ROUNDS)
        return await waiter.future

    def append_unacknowledged(self, make: Make) -> None:
        """A record that costs nobody anything if a crash takes it: it goes to the disk with the next one that is waited
        for, or within UNAWAITED_DELAY_S. From one event loop. What the disk says is logged, and is `failure`. Raises
        `Refused`: Overloaded where too many wait, Internal after `close`.
        """
        self._enqueue(_FireAndForget(make))
        if not self._is_waking_soon:
            self._is_waking_soon = True
            asyncio.get_running_loop().call_later(UNAWAITED_DELAY_S, self._wake_soon)

    def append_blocking(self, make: Make, timeout_s: float = BLOCKING_TIMEOUT_S) -> int:
        """As `append`, for a thread without a loop. After Refused(DeadlineExceeded) the record may still be made."""
        waiter = _ThreadWaiter(make)
        self._enqueue(waiter)
        self._wakes.put(None)
        if not waiter.done.wait(timeout_s):
            raise Refused(DeadlineExceeded(timeout_s, "writing the usage spool"))
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return waiter.outcome

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` on the running loop after each commit; returns what ends that."""
        loop, key = asyncio.get_running_loop(), id(callback)
        with self._lock:
            self._listeners[key] = (loop, callback)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe

    def close(self) -> None:
        """Commit what waits, end the thread, release the directory; remove it where all was shipped. Idempotent.

        If the disk does not answer within BLOCKING_TIMEOUT_S, that is logged, and thread and directory stay as they are
        until the process ends.
        """
        with self._lock:
            self._closing = True
        self._wakes.put(None)
        self._thread.join(BLOCKING_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the disk of a spool does not answer: records that wait are lost", extra={"source": self.source})
            return
        self._journal.close()
        self.tail.close()
        if self._source_directory.is_open:
            self._source_directory.remove_if_shipped()
            self._source_directory.close()

    def _wake_soon(self) -> None:
        self._is_waking_soon = False
        self._wakes.put(None)

    def _enqueue(self, waiter: Waiter, loop: asyncio.AbstractEventLoop | None = None) -> bool:
        """Whether that loop is going to wake the committer anyway."""
        with self._lock:
            if self._closing:
                raise Refused(Internal())
            if len(self._waiting) >= self._max_waiting:
                raise Refused(Overloaded("the usage spool's queue", self._max_waiting, 1.0))
            self._waiting.append(waiter)
            before, self._lingering = self._lingering, loop or self._lingering
            return before is loop

    def _wake_after_rounds(self, loop: asyncio.AbstractEventLoop, rounds: int) -> None:
        """Rounds of the loop: no time where it is idle, and company for the record where it is busy."""
        if rounds:
            loop.call_soon(self._wake_after_rounds, loop, rounds - 1)
        else:
            self._wakes.put(None)

    def _run(self) -> None:
        while self._commit_next():
            pass

    def _commit_next(self) -> bool:
        """Wait for a wake, then commit one group. False once the spool is closing and nothing waits."""
        self._wakes.get()
        with self._lock:
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            self._lingering = None
            if self._closing and not group:
                return False
            if self._closing or self._waiting:
                self._wakes.put(None)  # there is more to be done than this
        if group:
            self._deliver(group, self._commit([waiter.make for waiter in group]))
        return True

    def _commit(self, makes: Sequence[Make]) -> list[Outcome]:
        try:
            outcomes = self._journal.commit(makes)
        except Exception:  # a defect: whoever waits is told, and the thread lives on
            log.exception("the committer failed", extra={"source": self.source})
            outcomes = [Refused(Internal())] * len(makes)
        self._committed = self._journal.committed
        refusals = [outcome.failure for outcome in outcomes if isinstance(outcome, Refused)]
        if refusals:
            self._failure = refusals[0] if isinstance(refusals[0], Unavailable) else Unavailable("the usage spool")
        elif any(isinstance(outcome, int) for outcome in outcomes):  # else nothing was written
            self._failure = None
        return outcomes

    def _deliver(self, group: Sequence[Waiter], outcomes: Sequence[Outcome]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for waiter, outcome in zip(group, outcomes, strict=True):
            if isinstance(waiter, _FireAndForget):
                if isinstance(outcome, Exception):
                    log.error("a record is lost", extra={"source": self.source, "error": repr(outcome)})
                continue
            waiter.outcome = outcome
            if isinstance(waiter, _ThreadWaiter):
                waiter.done.set()
            else:
                by_loop.setdefault(waiter.loop, []).append(waiter.resolve)
        with self._lock:
            listeners = list(self._listeners.values())
        for loop, callback in listeners:
            by_loop.setdefault(loop, []).append(callback)
        for loop, callbacks in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, callbacks)
            except RuntimeError:  # that loop is closed: nobody waits
                continue


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
