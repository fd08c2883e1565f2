"""Apply a model's degradation policy: answer with less quality if the request would be late or refused.

`degradation_policy.py` decides which steps are tried, and when. No step is applied after a replica has begun, or after
the client has the head, which names the applied step.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from activator.accounting.request_account import AppliedStep
from activator.answers.response_cache import CacheableRequest, ResponseStore
from activator.degradation.degradation_policy import WaitHysteresis, helps_against, is_recoverable, steps_for_wait
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.throttler import Throttler
from activator.request.client_response import ClientResponse
from activator.request.inference_request import InferenceRequest
from activator.routing.policy.request_body import estimate
from activator.routing.policy.version_key import VersionKey, key_of
from activator.routing.policy.version_resolution import ModelEntry, resolve_version
from activator.routing.routing_table import RoutingTable
from activator.scale_link.load_reporter import LoadReporter
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import DEFAULT_ALIAS, ModelReference, split_qualified_name
from kelvin.contracts.serving.control_messages import VersionRow
from kelvin.contracts.serving.degradation_steps import DEGRADE_HEADER, Cached, CapOutput, DegradationStep, Fallback
from kelvin.contracts.serving.token_limits import TokenLimits

_HEADER: Final = DEGRADE_HEADER.encode()
_NEVER: Final = b"never"

VersionServer = Callable[[VersionRow], Awaitable[None]]  # answers the request at that version, with its current fields


class _Job(NamedTuple):
    request: InferenceRequest
    row: VersionRow  # of the requested model
    client_response: ClientResponse
    serve_version: VersionServer
    old_response: CacheableRequest | None


class _RequestState(NamedTuple):
    """The fields of a request that a step changes."""

    entry: ModelEntry
    ceiling: TokenLimits
    key: VersionKey | None
    queued_request: QueuedRequest | None
    model: str
    version: str | None

    @classmethod
    def of(cls, request: InferenceRequest) -> "_RequestState":
        return cls(
            entry=request.entry,
            ceiling=request.ceiling,
            key=request.key,
            queued_request=request.queued_request,
            model=request.account.model,
            version=request.account.version,
        )

    def restore(self, request: InferenceRequest) -> None:
        """Give the request the model, version, limits and queue item that it had before the step."""
        request.entry, request.ceiling = self.entry, self.ceiling
        request.key, request.queued_request = self.key, self.queued_request
        request.account.model, request.account.version = self.model, self.version
        request.account.applied_step = None


class Degradation:
    """Applies degradation policies. `old_responses` has answers for `cached` steps. `clock` returns monotonic time."""

    def __init__(
        self,
        table: RoutingTable,
        throttler: Throttler,
        reporter: LoadReporter,
        old_responses: ResponseStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._throttler = throttler
        self._reporter = reporter
        self._old_responses = old_responses
        self._clock = clock
        self._waits: WaitHysteresis[tuple[VersionKey, str, PriorityClass]] = WaitHysteresis()

    def __repr__(self) -> str:
        return f"<Degradation waits={len(self._waits)}>"

    def may_degrade(self, request: InferenceRequest) -> bool:
        """Return whether the request may get a lower quality. Raises Refused(InvalidRequest) for a bad header."""
        value = request.exchange.header(_HEADER)
        if value is not None:
            if value != _NEVER:
                raise Refused(InvalidRequest(DEGRADE_HEADER, f"({len(value)} bytes)", "must be never"))
            return False
        return request.reference.alias == DEFAULT_ALIAS and bool(self._steps(request))

    async def serve(
        self, request: InferenceRequest, row: VersionRow, client_response: ClientResponse, serve_version: VersionServer
    ) -> None:
        """Answer the request, as it is or by a step. Raises Refused with the failure of the undegraded request."""
        steps, key = self._steps(request), key_of(row)
        old_response = self._open_old_response(request, row, steps)
        job = _Job(request, row, client_response, serve_version, old_response)
        wait_s, is_start = self._expected_wait(request, key)
        tried = steps_for_wait(steps, wait_s, request.priority_class, is_start=is_start)
        for step in tried:
            if await self._try(step, job, wait_s):
                return
        try:
            await serve_version(row)
        except Refused as refused:
            code = refused.failure.code
            if not is_recoverable(refused.failure.status, code):
                raise
            for step in steps:
                if (
                    _is_untouched(request)
                    and step not in tried
                    and helps_against(step, code)
                    and await self._try(step, job)
                ):
                    return
            raise
        if old_response is not None:
            old_response.keep(request)

    def _steps(self, request: InferenceRequest) -> tuple[DegradationStep, ...]:
        """Return the model's steps for the plan of the calling tenant."""
        entry = request.entry
        if not entry.plan_ladders:
            return entry.ladder
        return entry.steps_for_plan(self._table.limits(request.account.principal.tenant).plan)

    def _open_old_response(
        self, request: InferenceRequest, row: VersionRow, steps: tuple[DegradationStep, ...]
    ) -> CacheableRequest | None:
        """Return the cache entry for a `cached` step, which also records this response. None without such a step."""
        if not any(isinstance(step, Cached) for step in steps):
            return None
        answer_key = self._old_responses.derive_cache_key(request, row.version)
        if answer_key is None:
            return None
        caching = CacheableRequest(self._old_responses, answer_key)
        caching.record_response(request.exchange, [])
        return caching

    async def _try(self, step: DegradationStep, job: _Job, wait_s: float | None = None) -> bool:
        """Try to answer by this step, to avoid a wait or a refusal. If it returns False, the request's model, version
        and token limits are as before. Budget, tokens per minute and timeline stages may be those of the attempt.
        """
        if isinstance(step, Cached):
            with self._count_skipped_request(job, wait_s):
                return job.old_response is not None and await job.old_response.try_old_answer(
                    job.request, job.client_response, step.age_s
                )
        before = _RequestState.of(job.request)
        row = self._apply(step, job, wait_s)
        if row is None:
            return False
        try:
            with self._count_skipped_request(job, None if row is job.row else wait_s):
                await job.serve_version(row)
        except Refused:
            if not _is_untouched(job.request):
                raise
            before.restore(job.request)
            return False
        return True

    def _apply(self, step: CapOutput | Fallback, job: _Job, wait_s: float | None) -> VersionRow | None:
        """Change the request as the step says. Return the version to ask, or None if the step does not help."""
        request, account = job.request, job.request.account
        match step:
            case CapOutput(tokens=tokens):
                if estimate(request.parsed_body, 0, job.row, request.ceiling).output <= tokens:
                    return None
                request.ceiling = replace(request.ceiling, cap_tokens=tokens)
                value = f"cap-output={tokens}"
                account.applied_step = AppliedStep("cap-output", value, value, account.model)
                return job.row
            case Fallback(model=model):
                found = self._find_fallback(request, model, wait_s)
                if found is None:
                    return None
                request.entry, row = found
                requested = account.model
                account.model, account.version = request.entry.name_for(account.principal.tenant), row.version
                account.applied_step = AppliedStep(
                    "fallback", f"fallback={account.model}", f"fallback-of={requested}", requested
                )
                return row

    @contextmanager
    def _count_skipped_request(self, job: _Job, wait_s: float | None) -> Iterator[None]:
        """Report a request for the original version to the autoscaler, since it would have waited there."""
        if wait_s is None:  # already reported when the request was refused
            yield
            return
        key = key_of(job.row)
        self._reporter.begin_request(key, lambda _: True)
        self._throttler.wake_for(key, wait_s)  # a version at zero is woken at once
        try:
            yield
        finally:
            self._reporter.end_request(key)

    def _find_fallback(
        self, request: InferenceRequest, fallback: str, wait_s: float | None
    ) -> tuple[ModelEntry, VersionRow] | None:
        """Return the fallback model and version. None if they may not serve it, or may not be faster than `wait_s`."""
        caller = request.account.principal
        owner, model = split_qualified_name(request.entry.tenant, fallback)
        entry = self._table.find_callable_model(caller.tenant, owner, model)
        if entry is None or not caller.may_call(entry.name_for(caller.tenant)):
            return None
        try:
            row = resolve_version(ModelReference(model, DEFAULT_ALIAS, None), entry, request.split_key(entry))
        except Refused:
            return None
        output_tokens, limits = request.parsed_body.output_tokens, row.limits
        if request.path not in ROUTES_BY_KIND[row.kind] or len(request.body) > limits.max_body_bytes:
            return None
        if output_tokens is not None and output_tokens > limits.max_output_tokens:
            return None
        if wait_s is not None:
            key = key_of(row)
            fallback_wait_s, is_start = self._throttler.estimate_new_request_wait(
                key, caller.tenant, request.priority_class
            )
            if (is_start and fallback_wait_s is None) or (fallback_wait_s or 0.0) >= wait_s:
                return None
        return entry, row

    def _expected_wait(self, request: InferenceRequest, key: VersionKey) -> tuple[float, bool]:
        """Return the expected wait, and whether it is for a start, which only shrinks and needs no hysteresis."""
        tenant = request.account.principal.tenant
        wait_s, is_start = self._throttler.estimate_new_request_wait(key, tenant, request.priority_class)
        if is_start:
            return wait_s or 0.0, True
        return self._waits.record_wait((key, tenant, request.priority_class), wait_s or 0.0, self._clock()), False


def _is_untouched(request: InferenceRequest) -> bool:
    """Return whether no replica has begun, the client has received nothing, and there is time left."""
    return request.account.runtime_id is None and not request.exchange.has_started and request.remaining_s() > 0
