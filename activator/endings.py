"""What is told of a request when it has ended: a line in the log, the meters, its trace. Its record is `usage`'s."""

import logging

from activator.account import Account
from activator.meters import Meters
from contracts.errors import Failure
from contracts.problem import code_of, status_of
from contracts.traffic_errors import DeadlineTooShort, Displaced, Overloaded
from telemetry.policy.spans import RequestFacts
from telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)

_SHED = frozenset({Overloaded.code, DeadlineTooShort.code, Displaced.code})  # as it should be, however often


class Endings:
    """Called once for each account, with why it failed, its outcome and its status. Never waits, never fails."""

    def __init__(self, meters: Meters, telemetry: Telemetry) -> None:
        self._meters = meters
        self._telemetry = telemetry

    def __call__(self, account: Account, failure: Failure | None, outcome: str, status: int) -> None:
        self._meters.ended(account, outcome, status)
        if self._telemetry.sender is not None:
            self._telemetry.request(_facts(account, outcome, status))
        _say(account, failure, outcome, status)


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


def _say(account: Account, failure: Failure | None, outcome: str, status: int) -> None:
    """What was slow to start or is our fault is told; the rest, of which there is any number, at DEBUG only."""
    ours = failure is not None and status_of(failure) >= 500 and code_of(failure) not in _SHED
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
