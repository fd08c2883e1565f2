"""Write the usage records of requests whose activator is gone, so that delivered tokens are still charged.

A request's account is kept here from the moment it leaves the engine until its activator's record is durable. This
applies to every request whose response was begun. A retry of the same request replaces the account of the one before.

A local activator is alive while it holds the lock on its spool. An activator on another host counts as alive for a
while after its last request. If both write a record, the ledger keeps the activator's.

A request that another replica answered first is also recorded here: as cancelled, with no tokens delivered.
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

from kelvin.contracts.accounting.usage import Receipt, RecordOrigin, RequestRecord
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Cancelled
from kelvin.contracts.wire import encode
from kelvin.process.loops import Loops
from kelvin.spool import Shipper, Spool, has_owner
from kelvin.spool.shipper import Post

log = logging.getLogger(__name__)

DELETE_GRACE_S: Final = 1.0  # a DELETE on another connection may arrive after this one has closed
ORPHAN_POLL_S: Final = 0.05  # between two checks for dead activators; short, as this replica may die next
MAX_PENDING_RECORDS: Final = 4096
REMOTE_TIMEOUT_S: Final = 60.0  # an activator on another host counts as gone this long after its last request
MAX_REMOTE_ACTIVATORS: Final = 256

# Appends a durable record and returns its sequence number. The argument gets that number and returns the record.
AppendRecord = Callable[[Callable[[int], bytes]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class UnconfirmedRequest:
    """The account of a request that has left the engine. `activator` names the spool that owes its record, or is ""."""

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
    idempotency_value: str = ""  # the value that the activator would have recorded; "" for none
    degraded: str = ""  # the value that the activator would have recorded

    def with_delivered(self, tokens: int) -> "UnconfirmedRequest":
        """Return the account with a later acknowledgement. The token count never decreases."""
        return replace(self, delivered_tokens=max(self.delivered_tokens, min(tokens, self.counts.completion_tokens)))

    def as_answered_elsewhere(self) -> "UnconfirmedRequest":
        """Return the account for a request that another replica answered. It charges no tokens."""
        return replace(self, delivered_tokens=0, idempotency_value="")

    def build_record(self, source: str, sequence: int) -> RequestRecord:
        """Return the usage record. It charges the tokens that were acknowledged, not those that were generated."""
        return RequestRecord(
            request_id=self.request_id,
            origin=RecordOrigin.ORPHAN,
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
            once=self.idempotency_value or UNSET,
            degraded=self.degraded or UNSET,
        )


@dataclass(slots=True)
class _PendingRecord:
    account: UnconfirmedRequest
    lost_at_s: float | None  # on the loop's clock: when its connection closed without an end or a DELETE


class OrphanRecords:
    """The accounts of requests that have left the engine, until their activators report durable records. The record is
    written here if the activator is dead, or closed the connection without a DELETE. Beyond MAX_PENDING_RECORDS,
    the oldest account is written at once. A duplicate record does no harm, because the ledger keeps the activator's.
    """

    def __init__(
        self,
        source: str,
        append: AppendRecord,
        is_activator_alive: Callable[[str], bool],
        grace_s: float = DELETE_GRACE_S,
        remote_timeout_s: float = REMOTE_TIMEOUT_S,
    ) -> None:
        """`append` writes a record durably. `is_activator_alive(activator)` returns whether that activator runs."""
        self._source = source
        self._is_activator_alive = is_activator_alive
        self._grace_s = grace_s
        self._poll_s = min(grace_s, ORPHAN_POLL_S)
        self._remote_timeout_s = remote_timeout_s
        self._append_record = append
        self._pending: dict[str, _PendingRecord] = {}
        self._poll_timer: asyncio.TimerHandle | None = None
        self._dead_activators: frozenset[str] = frozenset()  # at the last check
        self._empty = asyncio.Event()
        self._empty.set()
        self._writing: set[asyncio.Task[None]] = set()
        # Time of the last request of each activator on another host, the most recent one last.
        self._remote_activators: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<OrphanRecords kept={len(self._pending)} writing={len(self._writing)}>"

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, account: UnconfirmedRequest, *, connection_lost: bool) -> None:
        """Keep the account of a request that has left the engine and whose record is unconfirmed."""
        previous = self._pending.pop(account.request_id, None)
        if previous is None and len(self._pending) >= MAX_PENDING_RECORDS:
            self._write(next(iter(self._pending)), reason="too many requests without a record")
        loop = asyncio.get_running_loop()
        self._pending[account.request_id] = _PendingRecord(account, loop.time() if connection_lost else None)
        self._empty.clear()
        self._poll_timer = self._poll_timer or loop.call_later(self._poll_s, self._poll_activators)

    def record_remote_activator(self, activator: str) -> None:
        """Note that this activator is on another host, with its spool, and is alive now."""
        self._remote_activators.pop(activator, None)
        self._remote_activators[activator] = asyncio.get_running_loop().time()
        if len(self._remote_activators) > MAX_REMOTE_ACTIVATORS:
            del self._remote_activators[next(iter(self._remote_activators))]

    def leave_to_activator(self, request_id: str) -> None:
        """Leave the record to the request's activator, which is alive."""
        if (pending := self._pending.get(request_id)) is not None:
            pending.lost_at_s = None

    def record_answered_elsewhere(self, request_id: str) -> None:
        """Write this replica's record at once, because the activator's record will name another replica."""
        if (pending := self._pending.get(request_id)) is not None:
            pending.account = pending.account.as_answered_elsewhere()
            self._write(request_id, logging.DEBUG, "answered elsewhere")

    def apply_receipt(self, receipt: Receipt) -> None:
        """Apply a late acknowledgement, or the message that the activator's record is durable."""
        if receipt.recorded:
            if self._pending.pop(receipt.request_id, None) is not None:
                self._stop_polling()
        elif (pending := self._pending.get(receipt.request_id)) is not None:
            pending.account = pending.account.with_delivered(receipt.completion_tokens)

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` seconds until activators have confirmed all records."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def flush(self) -> None:
        """Write all accounts that are pending. Return when each record is durable or has failed."""
        for request_id in list(self._pending):
            self._write(request_id, reason="the replica ends")
        while self._writing:
            await asyncio.wait(self._writing)

    def _poll_activators(self) -> None:
        """Write the records that no activator will write. Repeats while any account is pending.

        An account of a dead activator waits for one more check, because its last acknowledgements may still arrive.
        """
        self._poll_timer = None
        loop = asyncio.get_running_loop()
        due_s = loop.time() - self._grace_s
        activators = {pending.account.activator for pending in self._pending.values()}
        dead = frozenset(activator for activator in activators if not self._is_alive(activator))
        still_dead, self._dead_activators = dead & self._dead_activators, dead
        for request_id, pending in list(self._pending.items()):
            is_lost = pending.lost_at_s is not None and pending.lost_at_s <= due_s
            if is_lost or pending.account.activator in still_dead:
                self._write(request_id)
        if self._pending:
            self._poll_timer = loop.call_later(self._poll_s, self._poll_activators)

    def _is_alive(self, activator: str) -> bool:
        if (last_request_s := self._remote_activators.get(activator)) is not None:
            return asyncio.get_running_loop().time() - last_request_s < self._remote_timeout_s
        try:
            return bool(activator) and self._is_activator_alive(activator)
        except OSError as error:  # such as too many open files: check again later
            log.warning("can't check whether an activator is alive", extra={"error": repr(error)})
            return True

    def _stop_polling(self) -> None:
        if not self._pending:
            self._empty.set()
            if self._poll_timer is not None:
                self._poll_timer.cancel()
                self._poll_timer = None

    def _write(self, request_id: str, level: int = logging.WARNING, reason: str = "activator lost") -> None:
        account = self._pending.pop(request_id).account
        self._stop_polling()
        task = asyncio.get_running_loop().create_task(self._append(account, level, reason), name=f"orphan-{request_id}")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _append(self, account: UnconfirmedRequest, level: int, reason: str) -> None:
        try:
            await self._append_record(lambda sequence: encode(account.build_record(self._source, sequence)))
            log.log(level, reason, extra={"request_id": account.request_id, "tokens": account.delivered_tokens})
        except (Refused, OSError) as error:
            # The meter page still counts the request, so the usage audit reports it.
            log.error("record lost", extra={"request_id": account.request_id, "error": repr(error)})


class SpooledRecords:
    """A spool that is opened with the first record. From then on its records are shipped to the control plane."""

    def __init__(self, directory: Path, source: str, post: Post) -> None:
        self._directory = directory
        self._source = source
        self._post = post
        self._spool: Spool | None = None
        self._opening = asyncio.Lock()
        self._loops = Loops()

    async def append(self, build_record: Callable[[int], bytes], /) -> int:
        """Append a record, as `Spool.append` does. Also raises OSError if the directory can't be made."""
        async with self._opening:
            if self._spool is None:
                self._spool = await asyncio.to_thread(Spool.open, self._directory, self._source)
                self._loops.start("shipper", Shipper(self._spool, self._post).run)
        return await self._spool.append(build_record)

    async def close(self) -> None:
        """Close the spool. A later recovery ships the records that are left."""
        await self._loops.close()
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)


@asynccontextmanager
async def open_orphan_records(directory: Path, source: str, post: Post) -> AsyncIterator[OrphanRecords]:
    """Open orphan records over their own spool, apart from the activators'. On exit every record is durable."""
    records = SpooledRecords(directory, source, post)
    orphans = OrphanRecords(source, records.append, partial(has_owner, directory))
    try:
        yield orphans
    finally:
        await orphans.flush()
        await records.close()
