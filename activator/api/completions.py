"""Serve one inference request from its key to its last byte. A request without a callable model leaves no record."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.usage_records import UsageRecords
from activator.answers.idempotency import Idempotency
from activator.answers.idempotency_policy import IDEMPOTENCY_HEADER
from activator.answers.response_cache import CACHE_HEADER, ResponseCache
from activator.auth.authenticator import Authenticator
from activator.degradation.degradation import Degradation
from activator.http.exchange import ClientGone, Exchange, RequestLimits, now_us
from activator.limits.concurrency_limits import SharedCapacity
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.wait_estimate import UNKNOWN, WaitEstimate, redact_for_caller
from activator.queue.throttler import Throttler
from activator.request.attempts import Attempts
from activator.request.client_response import ClientResponse, log_internal_error
from activator.request.inference_request import WAITING, InferenceRequest, parse_inference_request
from activator.request.tenant_limits import TenantLimiter
from activator.routing.policy.request_body import ceiling_of, estimate
from activator.routing.policy.traffic_split import Availability, ModelEntry, choose_version, find_version, resolve
from activator.routing.policy.version_key import VersionKey, key_of
from activator.routing.request_routes import RunInference
from activator.routing.routing_table import RoutingTable
from activator.scale_link.load_reporter import LoadReporter
from kelvin.contracts.artifacts.kind_routes import INFER_PATH, ROUTES_BY_KIND, wrong_kind_failure
from kelvin.contracts.artifacts.tensor_schema import check_schema
from kelvin.contracts.errors import BodyTooLarge, ModelNotFound, Refused, Unavailable
from kelvin.contracts.problem import open_inference_error, openai_error
from kelvin.contracts.serving.control_messages import Scope, StartProblem, VersionRow
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded


class Completions:
    """Serves completions, chats, embeddings and predictions."""

    def __init__(
        self,
        authenticator: Authenticator,
        table: RoutingTable,
        throttler: Throttler,
        reporter: LoadReporter,
        attempts: Attempts,
        usage: UsageRecords,
        limits: RequestLimits,
        tenant_limiter: TenantLimiter,
        in_flight: InFlightRequests,
        idempotency: Idempotency,
        cache: ResponseCache,
        degradation: Degradation,
        unread: SharedCapacity,
    ) -> None:
        """`unread` has a place for each request that waits for its body."""
        self._authenticator = authenticator
        self._table = table
        self._throttler = throttler
        self._reporter = reporter
        self._attempts = attempts
        self._usage = usage
        self._limits = limits
        self._tenant_limiter = tenant_limiter
        self._in_flight = in_flight
        self._idempotency = idempotency
        self._cache = cache
        self._degradation = degradation
        self._unread = unread
        self._body_capacity = SharedCapacity(limits.body_bytes_in_all, "the room for request bodies", "bytes")

    async def serve(self, exchange: Exchange, request_route: RunInference) -> None:
        """Answer the request. Raises Refused without a record for bad credentials, a limit of the tenant or of this
        activator, a bad body, an unknown model or a malformed idempotency key.
        """
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        tenant_limits = self._table.limits(principal.tenant)
        body_bytes = self._limits.body_bytes if tenant_limits.body_bytes is None else tenant_limits.body_bytes
        permit = await self._tenant_limiter.acquire_permit(principal.tenant, tenant_limits)
        with permit, self._body_capacity.hold(principal.tenant, exchange.body_bound(body_bytes)) as body_permit:
            await self._tenant_limiter.enter(exchange, principal.tenant, tenant_limits)
            raw = await exchange.read_body(body_bytes, self._limits.body_s, self._unread, principal.tenant)
            body_permit.shrink(len(raw))
            inference_request = parse_inference_request(
                exchange, request_route, raw, principal, tenant_limits, self._table, self._limits.deadline_s
            )
            if exchange.header(IDEMPOTENCY_HEADER) is None:
                await self._work(inference_request)
            else:
                await self._idempotency.serve(inference_request, self._work, self._serve)

    async def _work(self, inference_request: InferenceRequest) -> None:
        """Compute the response, whether for its caller or for an idempotency key's broadcast, and settle the limits."""
        try:
            await self._serve(inference_request, self._run)
        finally:
            self._tenant_limiter.settle(inference_request)
            if inference_request.upstream is not None and inference_request.account.is_recorded:
                inference_request.upstream.recorded()

    async def _serve(
        self, inference_request: InferenceRequest, body: Callable[[InferenceRequest, ClientResponse], Awaitable[None]]
    ) -> None:
        """Answer the request by `body`. However that ends, the client gets an answer and there is a record."""
        exchange = inference_request.exchange
        form = open_inference_error if inference_request.path == INFER_PATH else openai_error

        def wait_estimate() -> WaitEstimate:
            if (
                inference_request.key is None
                or inference_request.queued_request is None
                or inference_request.stage not in WAITING
            ):
                return UNKNOWN
            return self._throttler.wait_estimate(
                inference_request.key, inference_request.queued_request, inference_request.deadline
            )

        client_response = ClientResponse(
            exchange,
            inference_request.account,
            self._usage,
            self._limits.hold_s,
            lambda: inference_request.stage,
            form,
            wait_estimate,
        )
        entry = self._in_flight.add(inference_request.account, exchange.client_request_id)
        try:
            with exchange.cancel_on_disconnect(inference_request.remaining_s()) as task, entry.bind_task(task):
                await body(inference_request, client_response)
        except Refused as refused:
            self._note_problem(inference_request, wait_estimate())
            await client_response.fail(refused.failure)
        except TimeoutError:
            waited_s = (now_us() - exchange.arrived_us) / 1e6
            problem = self._note_problem(inference_request, wait_estimate())
            await client_response.fail(
                DeadlineExceeded(waited_s, inference_request.stage, "" if problem is None else problem.message)
            )
        except ClientGone:
            await client_response.settle_disconnected(Cancelled())
        except asyncio.CancelledError:  # the drain is over; the remaining work is bounded and must be done
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            await client_response.fail(Unavailable("this activator"))
        except Exception as error:
            await client_response.fail(log_internal_error(error, exchange.request_id))
        finally:
            self._in_flight.remove(entry)

    def _note_problem(self, inference_request: InferenceRequest, seen: WaitEstimate) -> StartProblem | None:
        """Record for the timeline why no replica started, as far as the caller may read it."""
        if seen.problem is not None and inference_request.key is not None:
            is_owner = inference_request.account.principal.tenant == inference_request.key.tenant
            inference_request.account.start_problem = redact_for_caller(seen.problem, is_owner)
        return inference_request.account.start_problem

    async def _run(self, inference_request: InferenceRequest, client_response: ClientResponse) -> None:
        """Answer the request at the version that its reference names.

        While the request waits, the version may be deleted or the alias moved. Then the reference is resolved again,
        unless the client already has the head, which names the version.
        """
        while True:
            try:
                row = self._resolve(inference_request)
                caching = (
                    None
                    if inference_request.exchange.header(CACHE_HEADER) is None
                    else self._cache.open(inference_request, row.version)
                )
                if caching is not None and await caching.try_answer(
                    inference_request.exchange, inference_request, client_response
                ):
                    return
                if self._degradation.may_degrade(inference_request):
                    await self._degradation.serve(
                        inference_request,
                        row,
                        client_response,
                        lambda row: self._serve_version(row, inference_request, client_response),
                    )
                else:
                    await self._serve_version(row, inference_request, client_response)
                if caching is not None and inference_request.account.applied_step is None:
                    caching.keep(inference_request)
                return
            except Refused as refused:
                if not isinstance(refused.failure, ModelNotFound) or not self._try_update(inference_request):
                    raise

    def _try_update(self, inference_request: InferenceRequest) -> bool:
        """Update the model's entry. Return whether the reference names another version now."""
        entry = self._table.find_callable_model(
            inference_request.account.principal.tenant, inference_request.entry.tenant, inference_request.entry.model
        )
        if (
            entry is None
            or inference_request.exchange.has_started
            or _named(inference_request, entry) in (None, _named(inference_request, inference_request.entry))
        ):
            return False
        inference_request.entry = entry
        return True

    def _is_current(self, inference_request: InferenceRequest, key: VersionKey) -> bool:
        """Return whether the request still goes to that version: it exists, and the reference still names it. Once the
        client has the head, the version only has to exist.
        """
        entry = self._table.find_callable_model(
            inference_request.account.principal.tenant, inference_request.entry.tenant, inference_request.entry.model
        )
        if entry is inference_request.entry:
            return True
        if entry is None or find_version(entry, key.version) is None:
            return False
        return inference_request.exchange.has_started or _named(inference_request, entry) == _named(
            inference_request, inference_request.entry
        )

    def _resolve(self, inference_request: InferenceRequest) -> VersionRow:
        """Return the version that answers. Raises Refused if it does not accept this request."""
        row = resolve(
            inference_request.reference, inference_request.entry, inference_request.split_key(inference_request.entry)
        )
        if inference_request.entry.meanwhile and inference_request.reference.alias is not None:
            row = choose_version(row, inference_request.entry, self._availability)
        inference_request.account.version = row.version
        if inference_request.path not in ROUTES_BY_KIND[row.kind]:
            raise Refused(wrong_kind_failure(inference_request.reference.model, row.kind))
        if row.signature is not None:
            for given in inference_request.schemas:
                check_schema(given, row.signature)
        if len(inference_request.body) > row.limits.max_body_bytes:
            raise Refused(BodyTooLarge(row.limits.max_body_bytes))
        if (refusal := self._usage.refusal) is not None:  # accept no request that can't be recorded
            raise Refused(refusal)
        inference_request.ceiling = ceiling_of(inference_request.parsed_body, inference_request.tenant_limits)
        return row

    def _availability(self, row: VersionRow) -> Availability:
        return self._throttler.availability(key_of(row))

    async def _serve_version(
        self, row: VersionRow, inference_request: InferenceRequest, client_response: ClientResponse
    ) -> None:
        """Answer the request at that version. Raises Refused."""
        key = inference_request.key = key_of(row)
        nbytes = len(inference_request.body)
        tenant, most = (
            inference_request.account.principal.tenant,
            estimate(inference_request.parsed_body, nbytes, row, inference_request.ceiling),
        )
        queued_request = inference_request.queued_request = QueuedRequest(
            tenant,
            nbytes,
            most.tokens,
            inference_request.priority_class,
            inference_request.affinity,
            inference_request.tenant_limits.weight or 1,
        )
        await self._tenant_limiter.reserve(inference_request, most)
        inference_request.account.timeline.stamp(Stage.ROUTED, now_us())
        # The wake call of a version at zero reports the request. A second report would count it twice.
        self._reporter.begin_request(key, self._throttler.is_asleep, inference_request)
        try:
            client_response.defer_head()
            await self._attempts.serve(
                key,
                queued_request,
                inference_request,
                client_response,
                partial(self._is_current, inference_request, key),
            )
            await client_response.complete()
        finally:
            self._reporter.end_request(key, inference_request)


def _named(inference_request: InferenceRequest, entry: ModelEntry) -> str | None:
    """Return the version that the request's reference names in `entry`, or None."""
    try:
        return resolve(inference_request.reference, entry, inference_request.split_key(entry)).version
    except Refused:
        return None
