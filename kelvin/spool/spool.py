"""A process's durable spool: appends from any thread or event loop, one committer thread, group commit.

Records stay until a `Shipper` has shipped them. Callers define encoding and meaning of records.
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
LINGER_ROUNDS: Final = 1  # iterations of an event loop
UNAWAITED_DELAY_S: Final = 0.05  # delay after which unawaited appends are written to the disk

Outcome = int | Exception


class _LoopWaiter:
    """An append that a task of an event loop awaits."""

    __slots__ = ("future", "loop", "make", "outcome")

    def __init__(self, make: Make, loop: asyncio.AbstractEventLoop) -> None:
        self.make = make
        self.loop = loop
        self.future: asyncio.Future[int] = loop.create_future()
        self.outcome: Outcome = 0

    def resolve(self) -> None:
        """Resolve the future. Call on its loop."""
        if self.future.done():  # cancelled, but the record is kept
            return
        if isinstance(self.outcome, int):
            self.future.set_result(self.outcome)
        else:
            self.future.set_exception(self.outcome)


class _ThreadWaiter:
    """An append for which a thread blocks."""

    __slots__ = ("done", "make", "outcome")

    def __init__(self, make: Make) -> None:
        self.make = make
        self.done = threading.Event()
        self.outcome: Outcome = 0


class _FireAndForget:
    """An append without a waiter."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


Waiter = _LoopWaiter | _ThreadWaiter | _FireAndForget


class Spool:
    """The records of one source. A source names one process lifetime: never reuse a name."""

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
        self._lock = threading.Lock()  # protects the next four
        self._waiting: list[Waiter] = []
        self._lingering: asyncio.AbstractEventLoop | None = None  # the loop that will wake the committer
        self._closing = False
        self._is_waking_soon = False  # on the loop that calls `append_unacknowledged`
        self._listeners: dict[int, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self.tail = SegmentReader(source_directory.path, recent)  # used by the shipper
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
        """Open the spool `directory`/`source`. Raises OSError (BlockingIOError: a live process has it), ValueError."""
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
        """Return the last durable sequence."""
        return self._committed

    @property
    def failure(self) -> Unavailable | None:
        """Return why the last write failed, or None. Refuse new work with it: it could not be recorded."""
        return self._failure

    async def append(self, make: Make) -> int:
        """Return the record's sequence, once it is durable. `make(sequence)` runs on the committer's thread: keep it
        pure.

        Cancelling ends the wait, but the record is kept. After an error, nothing was recorded. Raises any error of
        `make`; ValueError for a record of illegal size; Refused(Unavailable) if the disk fails; Refused(Overloaded) if
        too many appends wait or the backlog is too large; Refused(Internal) after `close` or a defect.
        """
        loop = asyncio.get_running_loop()
        waiter = _LoopWaiter(make, loop)
        if not self._enqueue(waiter, loop):
            loop.call_soon(self._wake_after_rounds, loop, LINGER_ROUNDS)
        return await waiter.future

    def append_unacknowledged(self, make: Make) -> None:
        """Append a record whose loss in a crash is harmless. Call from one event loop.

        It is written with the next awaited record, or within UNAWAITED_DELAY_S. Disk errors are logged, and set
        `failure`. Raises `Refused`: Overloaded if too many appends wait, Internal after `close`.
        """
        self._enqueue(_FireAndForget(make))
        if not self._is_waking_soon:
            self._is_waking_soon = True
            asyncio.get_running_loop().call_later(UNAWAITED_DELAY_S, self._wake_soon)

    def append_blocking(self, make: Make, timeout_s: float = BLOCKING_TIMEOUT_S) -> int:
        """Append as `append` does, from a thread. After Refused(DeadlineExceeded) the record may still be written."""
        waiter = _ThreadWaiter(make)
        self._enqueue(waiter)
        self._wakes.put(None)
        if not waiter.done.wait(timeout_s):
            raise Refused(DeadlineExceeded(timeout_s, "writing the usage spool"))
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return waiter.outcome

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` on the running loop after each commit. Return a function that ends this."""
        loop, key = asyncio.get_running_loop(), id(callback)
        with self._lock:
            self._listeners[key] = (loop, callback)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe

    def close(self) -> None:
        """Commit waiting records, end the thread, release the directory; remove it if all was shipped. Idempotent.

        If the disk does not answer within BLOCKING_TIMEOUT_S, that is logged. Thread and directory then stay until the
        process ends.
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
        """Queue the append. Return whether `loop` will wake the committer anyway."""
        with self._lock:
            if self._closing:
                raise Refused(Internal())
            if len(self._waiting) >= self._max_waiting:
                raise Refused(Overloaded("the usage spool's queue", self._max_waiting, 1.0))
            self._waiting.append(waiter)
            before, self._lingering = self._lingering, loop or self._lingering
            return before is loop

    def _wake_after_rounds(self, loop: asyncio.AbstractEventLoop, rounds: int) -> None:
        """Wake the committer after some loop iterations: at once on an idle loop, and in groups on a busy one."""
        if rounds:
            loop.call_soon(self._wake_after_rounds, loop, rounds - 1)
        else:
            self._wakes.put(None)

    def _run(self) -> None:
        while self._commit_next():
            pass

    def _commit_next(self) -> bool:
        """Wait for a wake-up, then commit one group. Return False once the spool is closing and nothing waits."""
        self._wakes.get()
        with self._lock:
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            self._lingering = None
            if self._closing and not group:
                return False
            if self._closing or self._waiting:
                self._wakes.put(None)  # more groups wait
        if group:
            self._deliver(group, self._commit([waiter.make for waiter in group]))
        return True

    def _commit(self, makes: Sequence[Make]) -> list[Outcome]:
        try:
            outcomes = self._journal.commit(makes)
        except Exception:  # a defect: waiters get Internal, and the thread lives on
            log.exception("the committer failed", extra={"source": self.source})
            outcomes = [Refused(Internal())] * len(makes)
        self._committed = self._journal.committed
        refusals = [outcome.failure for outcome in outcomes if isinstance(outcome, Refused)]
        if refusals:
            self._failure = refusals[0] if isinstance(refusals[0], Unavailable) else Unavailable("the usage spool")
        elif any(isinstance(outcome, int) for outcome in outcomes):  # otherwise nothing was written
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
            except RuntimeError:  # the loop is closed, so nothing waits on it
                continue


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
