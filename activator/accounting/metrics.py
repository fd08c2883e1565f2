"""The activator's counters and histograms. The first MODELS pairs of tenant and model have series of their own."""

from functools import lru_cache
from typing import Final, NamedTuple

from activator.accounting.request_account import Account
from kelvin.contracts.errors import Failure
from kelvin.contracts.timeline import Stage
from kelvin.telemetry.policy.instruments import Labels, MetricsPage
from kelvin.telemetry.policy.labels import LabelCap, outcome_of

MODELS: Final = 64  # pairs with their own labels; all others are "other"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LABEL_CACHE_SIZE: Final = 1024  # label sets cached across requests
PER_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_MODEL: Final = ("tenant", "model")
_KINDS: Final = ("prompt", "cached", "completion")


class _LabelSets(NamedTuple):
    """Label values that requests with equal attributes share."""

    model: Labels
    starts: Labels
    requests: Labels
    tokens: tuple[Labels, ...]  # by kind of token


class RequestMetrics:
    """The request metrics on one page."""

    def __init__(self, page: MetricsPage) -> None:
        self._cap = LabelCap(MODELS)
        self._label_sets = lru_cache(LABEL_CACHE_SIZE)(self._make_label_sets)  # a pair keeps its own labels
        self._requests = page.counter(
            "kelvin_requests_total",
            "Requests that left a usage record, by outcome.",
            (*_MODEL, "outcome", "status", "start"),
        )
        self._refusals = page.counter(
            "kelvin_refusals_total",
            "Requests that left no usage record, such as bad keys and unknown names.",
            ("outcome", "status"),
        )
        self._refused_connections = page.counter(
            "kelvin_connections_refused_total",
            "Connections that were refused before TLS, by the limit that was reached.",
            ("limit",),
        )
        self._retries = page.counter(
            "kelvin_retries_total",
            "Attempts that failed before the client had a byte, by whether another one followed.",
            (*_MODEL, "failure", "then"),
        )
        self._hedges = page.counter(
            "kelvin_hedged_requests_total",
            "Late requests for which another replica had a free slot, by the attempt that answered: first, second, "
            "neither, or withheld if the retry budget was spent.",
            (*_MODEL, "first"),
        )
        self._first = page.histogram(
            "kelvin_first_token_seconds", "From arrival to an answer's first bytes.", (*_MODEL, "start"), SECONDS
        )
        self._per_token = page.histogram(
            "kelvin_token_seconds", "Mean time of a token after the first, by streamed request.", _MODEL, PER_TOKEN
        )
        self._queue = page.histogram(
            "kelvin_queue_seconds", "Waiting for a slot, a start included.", (*_MODEL, "start"), SECONDS
        )
        self._degraded = page.counter(
            "kelvin_degraded_total",
            "Requests that were degraded, by the step of the model's policy.",
            (*_MODEL, "step"),
        )
        self._verdicts = page.counter(
            "kelvin_firewall_total", "Calls of the operator's firewall, by verdict.", ("verdict",)
        )
        self._tokens = page.counter("kelvin_tokens_total", "Tokens by kind.", (*_MODEL, "kind"))

    def count_refusal(self, failure: Failure) -> None:
        """Count a request that ended before it had an account."""
        self._refusals.add((outcome_of(failure.code), str(failure.status)))

    def count_firewall_verdict(self, verdict: str) -> None:
        """Count a firewall verdict: `allow`, `refuse`, or without an answer `late`, `away`, `garbage`."""
        self._verdicts.add((verdict,))

    def count_malformed_request(self, status: int) -> None:
        """Count bytes that are no valid HTTP request. The application has not seen them."""
        self._refusals.add(("http", str(status)))

    def count_refused_connection(self, limit: str) -> None:
        """Count a refused connection. `limit` is `all` for the total, `address` for the limits of its address."""
        self._refused_connections.add((limit,))

    def count_failed_attempt(self, tenant_and_model: tuple[str, str], failure: str, next_step: str) -> None:
        """Count an attempt that failed before the client had a byte. `next_step`: `again`, or why it stays failed."""
        self._retries.add((*self._cap.bounded(tenant_and_model), outcome_of(failure), next_step))

    def count_hedged_request(self, tenant_and_model: tuple[str, str], winner: str) -> None:
        """Count a request that was late at one replica. `winner` began the response."""
        self._hedges.add((*self._cap.bounded(tenant_and_model), winner))

    def record_end(self, account: Account, outcome: str, status: int) -> None:
        """Count a request that has ended, and observe its times."""
        labels = self._label_sets(account.principal.tenant, account.model, outcome, status, account.cold)
        if account.applied_step is not None:
            requested = self._cap.bounded((account.principal.tenant, account.applied_step.requested_model))
            self._degraded.add((*requested, account.applied_step.step))
        self._requests.add(labels.requests)
        at_us = account.timeline.at_us
        if Stage.DISPATCHED in at_us:
            self._queue.observe(labels.starts, account.queued_us / 1e6)
        if Stage.FIRST_TOKEN in at_us:
            first_us = at_us[Stage.FIRST_TOKEN]
            self._first.observe(labels.starts, first_us / 1e6)
            further = account.delivered_tokens - 1
            if account.stream and further > 0:
                self._per_token.observe(labels.model, (at_us[Stage.DONE] - first_us) / 1e6 / further)
        prompt, cached, completion = labels.tokens
        if account.counts.prompt_tokens:
            self._tokens.add(prompt, account.counts.prompt_tokens)
        if account.counts.cached_tokens:
            self._tokens.add(cached, account.counts.cached_tokens)
        if account.delivered_tokens:
            self._tokens.add(completion, account.delivered_tokens)

    def _make_label_sets(self, tenant: str, model: str, outcome: str, status: int, is_cold: bool) -> _LabelSets:
        tenant_and_model = self._cap.bounded((tenant, model))
        starts = (*tenant_and_model, "cold" if is_cold else "warm")
        requests = (*tenant_and_model, outcome_of(outcome), str(status), starts[-1])
        return _LabelSets(tenant_and_model, starts, requests, tuple([(*tenant_and_model, kind) for kind in _KINDS]))
