"""Settle a request's account: its record is durable in the spool before the last byte of a charged response is sent.
Delivered tokens are those that the client's socket accepted. The spool ships records, the control plane prices them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from activator import dependencies
from activator.accounting.metrics import RequestMetrics
from activator.accounting.request_account import Account
from activator.accounting.timelines import Timelines
from kelvin.contracts.accounting.usage import OK, RequestRecord
from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import batch_of
from kelvin.contracts.traffic_errors import DeadlineTooShort, Overloaded, ShedByPriority
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.spool import Spool
from kelvin.telemetry.policy.spans import RequestFacts
from kelvin.telemetry.telemetry import Telemetry

PATH: Final = "/internal/v1/usage/requests"
POST_TIMEOUT_S: Final = dependencies.LEDGER.timeout_s
# expected under load
_SHED = frozenset({Overloaded.code, DeadlineTooShort.code, ShedByPriority.code})

log = logging.getLogger(__name__)


class UsageRecords:
    """Settles accounts, each once."""

    def __init__(
        self,
        spool: Spool,
        timelines: Timelines,
        *,
        on_end: Callable[[Account, Failure | None, str, int], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_end` is called for each settled account with its failure, outcome and status."""
        self._spool = spool
        self._timelines = timelines
        self._on_end = on_end
        self._wall_clock = wall_clock

    @property
    def source(self) -> str:
        """Name of the spool that receives the records."""
        return self._spool.source

    @property
    def refusal(self) -> Failure | None:
        """The failure of the last record write, None after a success. Refuse new requests with it."""
        return self._spool.failure

    async def settle(self, account: Account, failure: Failure | None = None, status: int | None = None) -> None:
        """Write the record and return when it is durable. Raises what `Spool.append` raises; then nothing was recorded.

        A successful response that can't be recorded stays unsettled: settle it again with the failure that the caller
        gets. Cancelling ends the wait, not the write, and a budget counts the record. A second call does nothing.
        """
        if account.is_settled:
            return
        record = self._begin(account, failure, status)
        try:
            sequence_number = await self._spool.append(
                lambda sequence: encode(msgspec.structs.replace(record, sequence=sequence))
            )
        except asyncio.CancelledError:
            if account.budget_reservation is not None:  # the record may become durable, so count it as the next one
                account.budget_reservation.settle(record, self._spool.committed + 1)
            self._report_end(account, failure, record)
            raise
        except Exception:
            if failure is None:
                account.is_settled, account.outcome = False, None
            else:
                self._report_end(account, failure, record)
            raise
        account.is_recorded = True
        if account.budget_reservation is not None:
            account.budget_reservation.settle(record, sequence_number)
        self._report_end(account, failure, record)

    def settle_soon(self, account: Account, failure: Failure, status: int | None = None) -> None:
        """Write the record of a request that no replica has seen, without waiting, so that refusing many requests is
        cheap.

        A crash may lose the last of these records, which cost nothing. Raises Refused if too many are queued. A second
        call does nothing.
        """
        if account.is_settled:
            return
        record = self._begin(account, failure, status)
        self._report_end(account, failure, record)
        self._spool.append_unacknowledged(lambda sequence: encode(msgspec.structs.replace(record, sequence=sequence)))

    def _begin(self, account: Account, failure: Failure | None, status: int | None) -> RequestRecord:
        """Mark the account as settled, and return its record."""
        account.is_settled = True
        outcome = account.outcome or (OK if failure is None else failure.code)
        account.outcome = outcome
        if status is None:
            status = 200 if failure is None else failure.status
        return account.record(self._spool.source, outcome, status, int(self._wall_clock() * 1e6))

    def _report_end(self, account: Account, failure: Failure | None, record: RequestRecord) -> None:
        """Keep the timeline, and report the end."""
        self._timelines.put(account.principal.tenant, account.request_id, account.snapshot_timeline)
        self._on_end(account, failure, record.outcome, record.status)


def ledger_poster(control: ServiceClient) -> Callable[[Sequence[bytes]], Awaitable[None]]:
    """Return a function that posts records to the ledger."""

    async def post(records: Sequence[bytes]) -> None:
        await control.call("POST", PATH, type(None), body=batch_of(records), timeout_s=POST_TIMEOUT_S)

    return post


class CompletionLog:
    """Reports each ended request once: log line, metrics, trace. Never waits, never fails."""

    def __init__(self, metrics: RequestMetrics, telemetry: Telemetry) -> None:
        self._metrics = metrics
        self._telemetry = telemetry

    def __call__(self, account: Account, failure: Failure | None, outcome: str, status: int) -> None:
        self._metrics.record_end(account, outcome, status)
        if self._telemetry.sender is not None:
            self._telemetry.request(_request_facts(account, outcome, status))
        _log_completion(account, failure, outcome, status)


def _request_facts(account: Account, outcome: str, status: int) -> RequestFacts:
    return RequestFacts(
        request_id=account.request_id,
        caller=account.caller_trace,
        tenant=account.principal.tenant,
        model=account.model,
        version=account.version,
        runtime_id=account.runtime_id,
        cold=account.cold,
        outcome=outcome,
        status=status,
        prompt_tokens=account.counts.prompt_tokens,
        cached_tokens=account.counts.cached_tokens,
        completion_tokens=account.delivered_tokens,
        began_at_us=account.started_at_us,
        stamps=account.timeline.stamps(),
    )


def _log_completion(account: Account, failure: Failure | None, outcome: str, status: int) -> None:
    """Log cold requests and failures that are our fault. All others, which may be many, are logged at DEBUG level."""
    is_our_fault = failure is not None and failure.status >= 500 and failure.code not in _SHED
    level = logging.WARNING if is_our_fault else logging.INFO if account.cold else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    stamps = account.timeline.stamps()
    fields = {
        "request_id": account.request_id,
        "tenant": account.principal.tenant,
        "model": account.model,
        "version": account.version,
        "runtime_id": account.runtime_id,
        "outcome": outcome,
        "status": status,
        "cold": account.cold,
        "hedged": account.hedge_winner,
        "completion_tokens": account.delivered_tokens,
        "took_ms": stamps[-1].at_us / 1000 if stamps else 0.0,
    }
    log.log(level, "a request ended", extra=fields)
