"""What is told of a request when it has ended: a line in the log. Records of it are `usage`'s."""

import logging

from activator.account import Account
from contracts.errors import Failure, Overloaded
from contracts.problem import code_of, status_of

log = logging.getLogger(__name__)


def say(account: Account, failure: Failure | None, outcome: str, status: int) -> None:
    """What was slow to start or is our fault is told; the rest, of which there is any number, at DEBUG only."""
    ours = failure is not None and status_of(failure) >= 500 and code_of(failure) != Overloaded.code
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
        "completion_tokens": account.delivered_tokens,
        "took_ms": stamps[-1].at_us / 1000 if stamps else 0.0,
    }
    log.log(level, "a request ended", extra=seen)
