"""Requests whose activator went away: their records are written here, so that what was delivered is still charged.
So are those of requests that another replica answered before us, as cancelled and with nothing delivered.

Every request whose answer was begun is kept here from the moment it leaves the engine until its activator's record is
durable. One that is sent here again has one account, its last one. Whether an activator lives is told by the lock on
its spool, of one on another host by when it last asked for something. Where both write, the activator's stands.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import UNSET

from contracts.errors import Refused
from contracts.frames import Counts
from contracts.traffic_errors import Cancelled
from contracts.usage import Origin, Receipt, RequestRecord
from contracts.wire import encode
from service.loops import Loops
from spool import Shipper, Spool, has_owner
from spool.shipper import Post

log = logging.getLogger(__name__)

GRACE_S: Final = 1.0  # a DELETE on another connection may come after the end of this one
LOOK_S: Final = 0.05  # between two looks for the dead, short since this replica may be the next to die
MAX_KEPT: Final = 4096
FAR_S: Final = 60.0  # after its last request an activator on another host counts as gone
MAX_FAR: Final = 256

# Makes a record durable. Its argument makes the record of its sequence number, which is returned.
Append = Callable[[Callable[[int], bytes]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Account:
    """A request that has left the engine. `activator` names the spool of whoever owes its record, "" where unknown."""

    request_id: str
    activator: str
    tenant: str
    model: str
    version: str
    key_id: str
    runtime_id: str
    started_at_us: int
    ended_at_us: int
    stream: bool
    counts: Counts
    delivered_tokens: int  # the last count that the activator acknowledged
    once: str = ""  # as the activator would have recorded it; "" for none
    degraded: str = ""  # as the activator would have recorded it

    def delivered(self, tokens: int) -> "Account":
        """Return the account with a later acknowledgement. The count never goes down."""
        return replace(self, delivered_tokens=max(self.delivered_tokens, min(tokens, self.counts.completion_tokens)))

    def answered_elsewhere(self) -> "Account":
        """Return the account of a request that another replica answered: it charges nothing."""
        return replace(self, delivered_tokens=0, once="")

    def record(self, source: str, sequence: int) -> RequestRecord:
        """What is charged: tokens that were acknowledged, not those that were made."""
        return RequestRecord(
            request_id=self.request_id,
            origin=Origin.ORPHAN,
            source=source,
            sequence=sequence,
            tenant=self.tenant,
            model=self.model,
            version=self.version,
            key_id=self.key_id,
            runtime_id=self.runtime_id,
            started_at_us=self.started_at_us,
            ended_at_us=self.ended_at_us,
            queued_us=0,
            outcome=Cancelled.code,
            status=Cancelled.status,
            stream=self.stream,
            prompt_tokens=self.counts.prompt_tokens,
            cached_tokens=self.counts.cached_tokens,
            completion_tokens=self.delivered_tokens,
            device_us=self.counts.device_us,
            once=self.once or UNSET,
            degraded=self.degraded or UNSET,
        )


@dataclass(slots=True)
class _Kept:
    account: Account
    lost_at_s: float | None  # on the loop's clock: its connection ended with nothing said


class Orphans:
    """Keeps the account of each request that has left the engine, until its activator says that the record is durable.

    Where the activator is dead, or broke off with nothing said, the record is written here. Bounded: over MAX_KEPT the
    oldest is written at once. A record too many does no harm: in the ledger the activator's stands.
    """

    def __init__(
        self,
        source: str,
        append: Append,
        lives: Callable[[str], bool],
        grace_s: float = GRACE_S,
        far_s: float = FAR_S,
    ) -> None:
        """`append` writes a record where it is durable. `lives(activator)` returns whether that activator lives."""
        self._source = source
        self._lives = lives
        self._grace_s = grace_s
        self._look_s = min(grace_s, LOOK_S)
        self._far_s = far_s
        self._make_durable = append
        self._kept: dict[str, _Kept] = {}
        self._look: asyncio.TimerHandle | None = None
        self._dead: frozenset[str] = frozenset()  # at the last look
        self._empty = asyncio.Event()
        self._empty.set()
        self._writing: set[asyncio.Task[None]] = set()
        self._far: dict[str, float] = {}  # activators on other hosts, the one that was heard last at the end

    def __repr__(self) -> str:
        return f"<Orphans kept={len(self._kept)} writing={len(self._writing)}>"

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, account: Account, *, lost: bool) -> None:
        """Keep the account of a request that has left the engine and whose record nobody has confirmed."""
        previous = self._kept.pop(account.request_id, None)
        if previous is None and len(self._kept) >= MAX_KEPT:
            self._write(next(iter(self._kept)), why="too many requests without a record")
        loop = asyncio.get_running_loop()
        self._kept[account.request_id] = _Kept(account, loop.time() if lost else None)
        self._empty.clear()
        self._look = self._look or loop.call_later(self._look_s, self._look_after)

    def heard_from_afar(self, activator: str) -> None:
        """Note an activator on another host, where its spool is."""
        self._far.pop(activator, None)
        self._far[activator] = asyncio.get_running_loop().time()
        if len(self._far) > MAX_FAR:
            del self._far[next(iter(self._far))]

    def claimed(self, request_id: str) -> None:
        """Leave the record to the request's activator, which lives."""
        if (kept := self._kept.get(request_id)) is not None:
            kept.lost_at_s = None

    def disown(self, request_id: str) -> None:
        """Record at once what was counted here, because the activator's record will name another replica."""
        if (kept := self._kept.get(request_id)) is not None:
            kept.account = kept.account.answered_elsewhere()
            self._write(request_id, logging.DEBUG, "answered elsewhere")

    def take(self, receipt: Receipt) -> None:
        """Take in a late acknowledgement, or the word that the record is durable."""
        if receipt.recorded:
            if self._kept.pop(receipt.request_id, None) is not None:
                self._look_no_more()
        elif (kept := self._kept.get(receipt.request_id)) is not None:
            kept.account = kept.account.delivered(receipt.completion_tokens)

    async def settled(self, patience_s: float) -> None:
        """Wait until nothing is kept, for at most `patience_s`: the last chance of activators before a replica ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._empty.wait()

    async def flush(self) -> None:
        """Write what is kept, and return when all of it is durable or given up."""
        for request_id in list(self._kept):
            self._write(request_id, why="the replica ends")
        while self._writing:
            await asyncio.wait(self._writing)

    def _look_after(self) -> None:
        """Write the records that no activator will write. Repeats while anything is kept.

        An account of a dead activator waits for one more look, because its last acknowledgements may still be on their
        way.
        """
        self._look = None
        loop = asyncio.get_running_loop()
        due_s = loop.time() - self._grace_s
        activators = {kept.account.activator for kept in self._kept.values()}
        dead = frozenset(activator for activator in activators if not self._is_alive(activator))
        still_dead, self._dead = dead & self._dead, dead
        for request_id, kept in list(self._kept.items()):
            left = kept.lost_at_s is not None and kept.lost_at_s <= due_s
            if left or kept.account.activator in still_dead:
                self._write(request_id)
        if self._kept:
            self._look = loop.call_later(self._look_s, self._look_after)

    def _is_alive(self, activator: str) -> bool:
        if (heard_s := self._far.get(activator)) is not None:
            return asyncio.get_running_loop().time() - heard_s < self._far_s
        try:
            return bool(activator) and self._lives(activator)
        except OSError as error:  # out of descriptors, say: look again
            log.warning("an activator can't be looked for", extra={"error": repr(error)})
            return True

    def _look_no_more(self) -> None:
        if not self._kept:
            self._empty.set()
            if self._look is not None:
                self._look.cancel()
                self._look = None

    def _write(self, request_id: str, level: int = logging.WARNING, why: str = "activator lost") -> None:
        account = self._kept.pop(request_id).account
        self._look_no_more()
        task = asyncio.get_running_loop().create_task(self._append(account, level, why), name=f"orphan-{request_id}")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _append(self, account: Account, level: int, why: str) -> None:
        try:
            await self._make_durable(lambda sequence: encode(account.record(self._source, sequence)))
            log.log(level, why, extra={"request_id": account.request_id, "tokens": account.delivered_tokens})
        except (Refused, OSError) as error:
            # The request stays counted in the meter page: reconciliation names it.
            log.error("record lost", extra={"request_id": account.request_id, "error": repr(error)})


class SpooledRecords:
    """Records in a spool that is opened with the first record, and shipped from then on."""

    def __init__(self, directory: Path, source: str, post: Post) -> None:
        self._directory = directory
        self._source = source
        self._post = post
        self._spool: Spool | None = None
        self._opening = asyncio.Lock()
        self._loops = Loops()

    async def append(self, make: Callable[[int], bytes], /) -> int:
        """As `Spool.append`. Also raises OSError if the directory can't be made."""
        async with self._opening:
            if self._spool is None:
                self._spool = await asyncio.to_thread(Spool.open, self._directory, self._source)
                self._loops.start("shipper", Shipper(self._spool, self._post).run)
        return await self._spool.append(make)

    async def close(self) -> None:
        """Close the spool. A later recovery ships what is left."""
        await self._loops.close()
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)


@asynccontextmanager
async def orphanage(directory: Path, source: str, post: Post) -> AsyncIterator[Orphans]:
    """Orphans over a spool of their own, beside those of the activators; left, everything kept is durable."""
    records = SpooledRecords(directory, source, post)
    orphans = Orphans(source, records.append, partial(has_owner, directory))
    try:
        yield orphans
    finally:
        await orphans.flush()
        await records.close()
