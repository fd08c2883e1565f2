"""Requests whose activator went away: their records are written here, so that what was delivered is still charged.

An activator that lives says so with a DELETE before it lets go of a request; its own record then stands. Where both
write one, the activator's stands over the orphan's of the same id.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from contracts.errors import Cancelled, Refused
from contracts.frames import Counts
from contracts.usage import Origin, RequestRecord
from contracts.wire import encode
from spool import Shipper, Spool
from spool.shipper import Post

log = logging.getLogger(__name__)

GRACE_S: Final = 1.0  # a DELETE on another connection may come after the end of this one
MAX_PENDING: Final = 1024


@dataclass(frozen=True, slots=True)
class Orphan:
    """A request as the runtime knows it at the loss of its connection."""

    request_id: str
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
        )


class Records(Protocol):
    """Where records become durable."""

    async def append(self, make: Callable[[int], bytes], /) -> int:
        """Returns the sequence that `make` was given."""
        ...


class Orphans:
    """Keeps each lost request for a moment, then records it, unless its activator turned out to live."""

    def __init__(self, source: str, open_records: Callable[[], Records], grace_s: float = GRACE_S) -> None:
        """`open_records` is called at the first record: most replicas never lose an activator."""
        self._source = source
        self._open_records = open_records
        self._grace_s = grace_s
        self._records: Records | None = None
        self._pending: dict[str, tuple[Orphan, asyncio.TimerHandle]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Orphans pending={len(self._pending)} writing={len(self._writing)}>"

    def adopt(self, orphan: Orphan) -> None:
        """Its connection is lost. Over MAX_PENDING the oldest is written at once."""
        if len(self._pending) >= MAX_PENDING:
            self._write(next(iter(self._pending)))
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._write, orphan.request_id)
        previous = self._pending.pop(orphan.request_id, None)
        if previous is not None:
            previous[1].cancel()
        self._pending[orphan.request_id] = (orphan, timer)

    def disown(self, request_id: str) -> None:
        """Its activator lives after all."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending[1].cancel()

    def delivered(self, request_id: str, tokens: int) -> None:
        """An acknowledgement that came after the loss."""
        pending = self._pending.get(request_id)
        if pending is not None:
            orphan, timer = pending
            tokens = max(orphan.delivered_tokens, min(tokens, orphan.counts.completion_tokens))
            self._pending[request_id] = (replace(orphan, delivered_tokens=tokens), timer)

    async def flush(self) -> None:
        """Write what is pending, and return when all of it is durable or given up."""
        for request_id in list(self._pending):
            self._write(request_id)
        while self._writing:
            await asyncio.wait(self._writing)

    def _write(self, request_id: str) -> None:
        orphan, timer = self._pending.pop(request_id)
        timer.cancel()
        task = asyncio.get_running_loop().create_task(self._append(orphan), name=f"orphan-{request_id}")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _append(self, orphan: Orphan) -> None:
        try:
            self._records = self._records or self._open_records()
            await self._records.append(lambda sequence: encode(orphan.record(self._source, sequence)))
            log.warning("activator lost", extra={"request_id": orphan.request_id, "tokens": orphan.delivered_tokens})
        except (Refused, OSError) as error:
            # The request stays counted in the meter page: reconciliation names it.
            log.error("record lost", extra={"request_id": orphan.request_id, "error": repr(error)})


class SpooledRecords:
    """A spool that is opened when the first record comes, and shipped from then on."""

    def __init__(self, directory: Path, source: str, post: Post) -> None:
        self._directory = directory
        self._source = source
        self._post = post
        self._spool: Spool | None = None
        self._shipping: asyncio.Task[None] | None = None

    def open(self) -> Spool:
        """Raises OSError where the directory cannot be had."""
        if self._spool is None:
            self._spool = Spool.open(self._directory, self._source)
            self._shipping = asyncio.get_running_loop().create_task(Shipper(self._spool, self._post).run(), name="ship")
        return self._spool

    async def close(self) -> None:
        """What is not shipped stays, for whoever recovers it."""
        if self._shipping is not None:
            self._shipping.cancel()
            await asyncio.gather(self._shipping, return_exceptions=True)
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)


def batch_of(payloads: Sequence[bytes]) -> object:
    """The body of a `RequestBatch` of records that are encoded already."""
    return {"records": [msgspec.Raw(payload) for payload in payloads]}


@asynccontextmanager
async def orphanage(directory: Path, source: str, post: Post) -> AsyncIterator[Orphans]:
    """Orphans over a spool of their own; left, everything pending is durable."""
    records = SpooledRecords(directory, source, post)
    orphans = Orphans(source, records.open)
    try:
        yield orphans
    finally:
        await orphans.flush()
        await records.close()
