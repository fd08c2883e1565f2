"""One request's account, and its record: durable in the spool before the last byte of the answer is sent.

Delivered tokens are those that the client-side socket took. Shipping is the spool's, rating the control plane's.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from activator.timelines import Timelines
from contracts.control import Principal, TimelineAnswer
from contracts.errors import Failure
from contracts.frames import Counts
from contracts.problem import code_of, status_of
from contracts.timeline import Timeline
from contracts.usage import Origin, RequestRecord
from contracts.wire import encode
from service.client import ServiceClient
from spool import Spool

log = logging.getLogger(__name__)

OK: Final = "ok"
PATH: Final = "/internal/v1/usage/requests"
POST_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class Account:
    """What is known of a request so far. Times are microseconds: `started_at_us` of the wall, the others monotonic."""

    request_id: str
    principal: Principal
    model: str
    stream: bool
    started_at_us: int
    timeline: Timeline
    version: str | None = None
    runtime_id: str | None = None
    queued_us: int = 0
    cold: bool = False
    seen: Counts = field(default_factory=Counts)
    delivered_tokens: int = 0
    status: int = 200
    is_settled: bool = False

    def answer(self) -> TimelineAnswer:
        """The timeline as it stands."""
        return TimelineAnswer(
            request_id=self.request_id,
            model=self.model,
            version=self.version,
            cold=self.cold,
            stamps=self.timeline.stamps(),
        )

    def record(self, source: str, outcome: str, status: int, ended_at_us: int) -> RequestRecord:
        """Prompt, cached tokens and device time are what it cost; completion tokens what was delivered."""
        return RequestRecord(
            request_id=self.request_id,
            origin=Origin.ACTIVATOR,
            source=source,
            sequence=0,  # the spool's to give
            tenant=self.principal.tenant,
            model=self.model,
            version=self.version,
            key_id=self.principal.key_id,
            runtime_id=self.runtime_id,
            started_at_us=self.started_at_us,
            ended_at_us=max(ended_at_us, self.started_at_us),  # the wall clock may step back
            queued_us=self.queued_us,
            outcome=outcome,
            status=status,
            stream=self.stream,
            prompt_tokens=self.seen.prompt_tokens,
            cached_tokens=self.seen.cached_tokens,
            completion_tokens=self.delivered_tokens,
            device_us=self.seen.device_us,
            timeline=self.timeline.stamps() if self.cold or outcome != OK else None,
        )


class Usage:
    """Settles accounts, each once."""

    def __init__(self, spool: Spool, timelines: Timelines, *, wall: Callable[[], float] = time.time) -> None:
        self._spool = spool
        self._timelines = timelines
        self._wall = wall

    @property
    def failing(self) -> bool:
        """Whether the last record could not be made durable: take on nothing that must be recorded."""
        return self._spool.failing

    async def settle(self, account: Account, failure: Failure | None = None, status: int | None = None) -> None:
        """Returns once the record is durable. Raises Refused where it can't be; then nothing was recorded.

        Cancelling gives up the wait, not the record. A second call does nothing.
        """
        if account.is_settled:
            return
        account.is_settled = True
        outcome = OK if failure is None else code_of(failure)
        if status is None:
            status = 200 if failure is None else status_of(failure)
        self._timelines.put(account.principal.tenant, account.answer())
        record = account.record(self._spool.source, outcome, status, int(self._wall() * 1e6))
        await self._spool.append(lambda sequence: encode(msgspec.structs.replace(record, sequence=sequence)))


def poster(control: ServiceClient) -> Callable[[Sequence[bytes]], Awaitable[None]]:
    """What hands records to the ledger: they are JSON already, so a batch is only put around them."""

    async def post(records: Sequence[bytes]) -> None:
        batch = b'{"records":[' + b",".join(records) + b"]}"
        headers = {"content-type": "application/json"}
        async with control.open("POST", PATH, payload=batch, timeout_s=POST_TIMEOUT_S, headers=headers) as answer:
            await answer.read()

    return post
