"""Settles a request's account: its record is durable in the spool before the last byte of what costs anything is sent.

Delivered tokens are those that the client-side socket took. Shipping is the spool's, rating the control plane's.
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
from activator.limits.tenant_budgets import OK
from kelvin.contracts.accounting.usage import RequestRecord
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
_SHED = frozenset({Overloaded.code, DeadlineTooShort.code, ShedByPriority.code})  # as it should be, however often

log = logging.getLogger(__name__)


class UsageRecords:
    """Settles accounts, each once."""

    def __init__(
        self,
        spool: Spool,
        timelines: Timelines,
        *,
        ended: Callable[[Account, Failure | None, str, int], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`ended` is told of each account when it is settled: why it failed, its outcome and its status."""
        self._spool = spool
        self._timelines = timelines
        self._ended = ended
        self._wall = wall

    @property
    def source(self) -> str:
        """The spool that records go to."""
        return self._spool.source

    @property
    def refusal(self) -> Failure | None:
        """Return the failure of the last write of a record, None if it succeeded. Refuse new requests with it."""
        return self._spool.failure

    async def settle(self, account: Account, failure: Failure | None = None, status: int | None = None) -> None:
        """Returns once the record is durable. Raises what `Spool.append` raises; then nothing was recorded. An answer
        that can't be recorded is not settled: settle it again, as the failure that its caller is told.

        Cancelling gives up the wait, not the record: a budget counts it. A second call does nothing.
        """
        if account.is_settled:
            return
        record = self._begin(account, failure, status)
        try:
            made = await self._spool.append(lambda sequence: encode(msgspec.structs.replace(record, sequence=sequence)))
        except asyncio.CancelledError:
            if account.budget_reservation is not None:  # what may stand counts, as the next that the ledger hears of
                account.budget_reservation.settle(record, self._spool.committed + 1)
            self._tell(account, failure, record)
            raise
        except Exception:
            if failure is None:
                account.is_settled, account.outcome = False, None
            else:
                self._tell(account, failure, record)
            raise
        account.is_recorded = True
        if account.budget_reservation is not None:
            account.budget_reservation.settle(record, made)
        self._tell(account, failure, record)

    def settle_soon(self, account: Account, failure: Failure, status: int | None = None) -> None:
        """Of a request that no replica has seen, which costs nothing: its record follows, and nobody waits for it, so
        that refusing many is cheap. A crash may take the last of such records along. Raises Refused where too many
        wait. A second call does nothing.
        """
        if account.is_settled:
            return
        record = self._begin(account, failure, status)
        self._tell(account, failure, record)
        self._spool.append_unacknowledged(lambda sequence: encode(msgspec.structs.replace(record, sequence=sequence)))

    def _begin(self, account: Account, failure: Failure | None, status: int | None) -> RequestRecord:
        """Nobody else settles it from now on. Return its record."""
        account.is_settled = True
        outcome = account.outcome or (OK if failure is None else failure.code)
        account.outcome = outcome
        if status is None:
            status = 200 if failure is None else failure.status
        return account.record(self._spool.source, outcome, status, int(self._wall() * 1e6))

    def _tell(self, account: Account, failure: Failure | None, record: RequestRecord) -> None:
        """Keep its timeline, and say how it ended."""
        self._timelines.put(account.principal.tenant, account.request_id, account.snapshot_timeline)
        self._ended(account, failure, record.outcome, record.status)


def ledger_poster(control: ServiceClient) -> Callable[[Sequence[bytes]], Awaitable[None]]:
    """What hands records to the ledger."""

    async def post(records: Sequence[bytes]) -> None:
        await control.call("POST", PATH, type(None), body=batch_of(records), timeout_s=POST_TIMEOUT_S)

    return post


class CompletionLog:
    """What is told of a request when it has ended: a line in the log, the meters, its trace.

    Called once for each account, with why it failed, its outcome and its status. Never waits, never fails.
    """

    def __init__(self, metrics: RequestMetrics, telemetry: Telemetry) -> None:
        self._metrics = metrics
        self._telemetry = telemetry

    def __call__(self, account: Account, failure: Failure | None, outcome: str, status: int) -> None:
        self._metrics.ended(account, outcome, status)
        if self._telemetry.sender is not None:
            self._telemetry.request(_facts(account, outcome, status))
        _log_completion(account, failure, outcome, status)


def _facts(account: Account, outcome: str, status: int) -> RequestFacts:
    return RequestFacts(
        request_id=account.request_id,
        caller=account.caller,
        tenant=account.principal.tenant,
        model=account.model,
        version=account.version,
        runtime_id=account.runtime_id,
        cold=account.cold,
        outcome=outcome,
        status=status,
        prompt_tokens=account.seen.prompt_tokens,
        cached_tokens=account.seen.cached_tokens,
        completion_tokens=account.delivered_tokens,
        began_at_us=account.started_at_us,
        stamps=account.timeline.stamps(),
    )


def _log_completion(account: Account, failure: Failure | None, outcome: str, status: int) -> None:
    """What was slow to start or is our fault is told; the rest, of which there is any number, at DEBUG only."""
    ours = failure is not None and failure.status >= 500 and failure.code not in _SHED
    level = logging.WARNING if ours else logging.INFO if account.cold else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    stamps = account.timeline.stamps()
    seen = {
        "request_id": account.request_id,
        "tenant": account.principal.tenant,
        "model": account.model,
        "version": account.version,
        "runtime_id": account.runtime_id,
        "outcome": outcome,
        "status": status,
        "cold": account.cold,
        "hedged": account.hedged,
        "completion_tokens": account.delivered_tokens,
        "took_ms": stamps[-1].at_us / 1000 if stamps else 0.0,
    }
    log.log(level, "a request ended", extra=seen)
