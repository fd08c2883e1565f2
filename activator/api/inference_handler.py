"""Compute the response to an inference request: from the cache, by a degradation step, or at a replica."""

from functools import partial

from activator.answers.response_cache import CACHE_HEADER, ResponseCache
from activator.api.version_resolver import VersionResolver
from activator.degradation.degradation import Degradation
from activator.http.exchange import now_us
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.throttler import Throttler
from activator.request.attempts import Attempts
from activator.request.client_response import ClientResponse
from activator.request.inference_request import InferenceRequest
from activator.request.tenant_limits import TenantLimiter
from activator.routing.policy.request_body import estimate
from activator.routing.policy.version_key import key_of
from activator.scale_link.load_reporter import LoadReporter
from kelvin.contracts.errors import ModelNotFound, Refused
from kelvin.contracts.serving.control_messages import VersionRow
from kelvin.contracts.timeline import Stage


class InferenceHandler:
    """Answers requests at the versions that their references name."""

    def __init__(
        self,
        resolver: VersionResolver,
        cache: ResponseCache,
        degradation: Degradation,
        attempts: Attempts,
        throttler: Throttler,
        reporter: LoadReporter,
        tenant_limiter: TenantLimiter,
    ) -> None:
        self._resolver = resolver
        self._cache = cache
        self._degradation = degradation
        self._attempts = attempts
        self._throttler = throttler
        self._reporter = reporter
        self._tenant_limiter = tenant_limiter

    async def serve(self, request: InferenceRequest, client_response: ClientResponse) -> None:
        """Answer the request. Raises Refused, ClientGone.

        While the request waits, the version may be deleted or the alias moved. Then the reference is resolved again,
        unless the client already has the head, which names the version.
        """
        while True:
            try:
                row = self._resolver.resolve(request)
                has_cache_header = request.exchange.header(CACHE_HEADER) is not None
                caching = self._cache.open(request, row.version) if has_cache_header else None
                if caching is not None and await caching.try_answer(request, client_response):
                    return
                if self._degradation.may_degrade(request):
                    await self._degradation.serve(
                        request, row, client_response, lambda row: self._serve_version(row, request, client_response)
                    )
                else:
                    await self._serve_version(row, request, client_response)
                if caching is not None and request.account.applied_step is None:
                    caching.keep(request)
                return
            except Refused as refused:
                if not isinstance(refused.failure, ModelNotFound) or not self._resolver.try_update(request):
                    raise

    async def _serve_version(self, row: VersionRow, request: InferenceRequest, client_response: ClientResponse) -> None:
        """Answer the request at that version. Raises Refused."""
        key = request.key = key_of(row)
        size = estimate(request.parsed_body, len(request.body), row, request.ceiling)
        queued_request = request.queued_request = QueuedRequest(
            request.account.principal.tenant,
            len(request.body),
            size.tokens,
            request.priority_class,
            request.affinity,
            request.tenant_limits.weight or 1,
        )
        await self._tenant_limiter.reserve(request, size)
        request.account.timeline.stamp(Stage.ROUTED, now_us())
        # The wake call of a version at zero reports the request. A second report would count it twice.
        self._reporter.begin_request(key, self._throttler.is_asleep, request)
        try:
            client_response.defer_head()
            is_current = partial(self._resolver.is_current, request, key)
            await self._attempts.serve(key, queued_request, request, client_response, is_current)
            await client_response.complete()
        finally:
            self._reporter.end_request(key, request)
