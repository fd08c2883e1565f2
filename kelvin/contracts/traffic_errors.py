"""Failures of inference traffic: overload, limits, deadlines, lost replicas, cancelled requests, filters."""

from dataclasses import dataclass
from typing import Literal

from kelvin.contracts.errors import Failure

StartReason = Literal["crash_loop", "missing_secret", "no_room", "refused_object", "no_image", "failed"]


@dataclass(frozen=True, slots=True)
class TooManyFailures(Failure):
    """Another invalid key from an address that sent too many. A valid key from the same address is served."""

    after_s: float
    code, status, retryable, retry_after = "too_many_failures", 429, True, "after_s"
    template = "missing or invalid API key, as many before it from this address"


@dataclass(frozen=True, slots=True)
class AddressBusy(Failure):
    """An address sends more requests than one address may. Its keys are not checked."""

    after_s: float
    code, status, retryable, retry_after = "address_busy", 429, True, "after_s"
    template = "too many requests from this address"


@dataclass(frozen=True, slots=True)
class FirewallRefused(Failure):
    """The operator's firewall refused the request. Its key is not checked."""

    code, status = "firewall_refused", 403
    template = "the request was refused by this installation's firewall"


@dataclass(frozen=True, slots=True)
class TenantBusy(Failure):
    """The tenant has as many requests in flight as it may have."""

    limit: int
    after_s: float
    code, status, retryable, retry_after = "tenant_busy", 429, True, "after_s"
    template = "your tenant has {limit} requests under way, which is its limit; retry after {after_s:g} s"


@dataclass(frozen=True, slots=True)
class RateLimited(Failure):
    """The tenant has used its limit of a minute. Uses OpenAI's code."""

    unit: str  # "requests" or "tokens"
    limit: int
    after_s: float
    code, status, retryable, retry_after = "rate_limit_exceeded", 429, True, "after_s"
    template = "your tenant may use {limit} {unit} a minute; retry after {after_s:.3g} s"


@dataclass(frozen=True, slots=True)
class BudgetSpent(Failure):
    """The tenant's monthly budget is spent, or the rest may not cover this request. Uses OpenAI's code."""

    budget_micros: int
    cost_micros: int = 0  # highest possible cost of the request
    code, status = "insufficient_quota", 429

    @property
    def message(self) -> str:
        if not self.cost_micros:
            budget = f"your tenant's budget of this month ({self.budget_micros} micro-units)"
            return f"{budget} is spent; the next one begins with the month (UTC)"
        return (
            f"your tenant's budget is {self.budget_micros} micro-units a month; what is left of this month's does not "
            f"cover this request, which may cost {self.cost_micros}: send a smaller one, as by a lower max_tokens"
        )


@dataclass(frozen=True, slots=True)
class BudgetUnavailable(Failure):
    """The rest of the tenant's budget is unknown: the store in which activators share it is unavailable."""

    after_s: float
    code, status, retryable, retry_after = "budget_unavailable", 429, True, "after_s"
    template = "what is left of your tenant's budget of this month can't be known; retry after {after_s:g} s"


@dataclass(frozen=True, slots=True)
class TooLargeForRate(Failure):
    """One request may take more than the tenant's limit of a minute, so waiting does not help."""

    tokens: int
    limit: int
    code, status = "request_exceeds_rate", 400
    template = (
        "this request may take {tokens} tokens, prompt and max_tokens together; your tenant may use {limit} a minute"
    )
    param_template = "max_tokens"


@dataclass(frozen=True, slots=True)
class Overloaded(Failure):
    """Every slot and every queue place is taken. `unit` names what is limited, unless `what` says it."""

    what: str
    limit: int
    after_s: float
    unit: str = ""
    code, status, retryable, retry_after = "overloaded", 503, True, "after_s"

    @property
    def message(self) -> str:
        limited = f"limit of {self.unit}: " if self.unit else "limit "
        return f"{self.what} is full ({limited}{self.limit}); retry after {self.after_s:g} s"


@dataclass(frozen=True, slots=True)
class ShedByPriority(Failure):
    """A queued request was shed from a full queue: no other queued request ranked lower in the shed order."""

    rank: str
    after_s: float
    code, status, retryable, retry_after = "displaced", 503, True, "after_s"
    template = "the queue is full, and this {rank} request made way for another one; retry after {after_s:.3g} s"


@dataclass(frozen=True, slots=True)
class ShedByFairShare(Failure):
    """A queued request was shed from a full queue, because its tenant held more than its share."""

    after_s: float
    code, status, retryable, retry_after = "over_share", 429, True, "after_s"
    template = "the queue is full, and your tenant has more than its share of it; retry after {after_s:.3g} s"


@dataclass(frozen=True, slots=True)
class BreakerOpen(Failure):
    """Starts or replicas of the version failed, and no other replica serves. Nothing is tried for a while."""

    cause: str  # the code of the last failure
    after_s: float  # 0: one request is trying now
    why: str = ""  # details of the cause
    cause_retryable: bool = True  # whether a retry may help against the cause
    code, status = "breaker_open", 503

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.cause_retryable

    @property
    def message(self) -> str:
        when = f"is not tried again for {self.after_s:.1f} s" if self.after_s > 0 else "is being tried by one request"
        # The reason of a failed start begins with its code.
        failed = f"{self.cause}: {self.why.removeprefix(f'{self.cause}: ')}" if self.why else self.cause
        return f"this model failed ({failed}), has no other replica, and {when}"

    @property
    def retry_after_s(self) -> float | None:
        return max(self.after_s, 1.0)


@dataclass(frozen=True, slots=True)
class DeadlineExceeded(Failure):
    """The deadline passed before a response began."""

    waited_s: float
    stage: str
    why: str = ""  # cause of the delay, if known
    code, status, retryable, retry_after = "deadline_exceeded", 504, True, 1.0

    @property
    def message(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"no answer within the deadline: {self.waited_s:.1f} s passed while {self.stage}{why}"


@dataclass(frozen=True, slots=True)
class DeadlineTooShort(Failure):
    """The expected wait exceeds the deadline. The request fails before the deadline has passed."""

    expected_s: float
    remaining_s: float
    is_starting: bool  # a first replica has to start; False: other requests are served first
    code, status, retryable, retry_after = "deadline_too_short", 503, True, "expected_s"

    @property
    def message(self) -> str:
        if self.is_starting:
            what, why = "begin", "the model's start takes"
        else:
            what, why = "end", "with those before it, it may take"
        return f"no answer can {what} within the {self.remaining_s:.3g} s that are left: {why} {self.expected_s:.3g} s"


@dataclass(frozen=True, slots=True)
class StartFailed(Failure):
    """No replica could be started. `reason` and `exit_status` are those of `StartProblem`."""

    why: str
    reason: StartReason = "failed"
    exit_status: int | None = None
    code, status, retryable = "start_failed", 503, True
    template = "no replica could be started: {why}"


@dataclass(frozen=True, slots=True)
class ReplicaLost(Failure):
    """The runtime was lost during the response. Bytes that were already sent stay valid."""

    code, status, retryable = "replica_lost", 502, True
    template = "the replica answering this request was lost before the answer was complete"


@dataclass(frozen=True, slots=True)
class Cancelled(Failure):
    """The caller cancelled the request. 499 is nginx's code for a client that closed the request."""

    code, status = "cancelled", 499
    template = "the request was cancelled"


@dataclass(frozen=True, slots=True)
class SlowReader(Failure):
    """The client read the response too slowly, and the buffer is full."""

    limit_tokens: int
    code, status = "slow_reader", 499
    template = "the answer was not read: {limit_tokens} tokens were waiting"


@dataclass(frozen=True, slots=True)
class KeyInUse(Failure):
    """A request with this `Idempotency-Key` is in flight and can't be joined."""

    after_s: float
    code, status, retryable, retry_after = "idempotency_key_in_use", 409, True, "after_s"
    template = "a request with this Idempotency-Key is under way; its answer can be had when it has ended"
    param_template = "idempotency-key"


@dataclass(frozen=True, slots=True)
class KeyReused(Failure):
    """Another request had this `Idempotency-Key`."""

    code, status = "idempotency_key_reused", 422
    template = "this Idempotency-Key was sent with another model, path or body; a new request needs a key of its own"
    param_template = "idempotency-key"


@dataclass(frozen=True, slots=True)
class ContentFiltered(Failure):
    """The model's filters stopped the text. The finding is not repeated. Uses OpenAI's code."""

    field: str
    label: str
    code, status = "content_filter", 400
    template = "{field}: holds what this model's filters stop ({label})"
    param_template = "{field}"


@dataclass(frozen=True, slots=True)
class FilterFailed(Failure):
    """The model's filters did not answer in time, and unchecked text may not pass."""

    code, status, retryable, retry_after = "filter_failed", 503, True, 1.0
    template = "this model's filters can't be reached in time"
