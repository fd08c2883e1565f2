"""Answer equal requests of a tenant from a cache for a short time, if the caller allows it.

A response is cached only if it depends on the request alone: `"temperature": 0`, and the same version. Equal requests
that arrive while the first one runs are computed, too. Entries are sealed like answers of idempotency keys. Answers
that a model's degradation policy may repeat are kept separately, for longer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, NamedTuple

from starlette.types import Message

from activator.accounting.request_account import AppliedStep
from activator.answers.answer_store import MAINTAIN_S, AnswerStore, LocalAnswerStore
from activator.answers.idempotency_policy import AnswerKey, AnswerStoreLimits, derive_answer_key
from activator.answers.idempotency_secret import Sealer, StoredResponse
from activator.answers.response_broadcast import RATE_LIMIT_PREFIX, replay
from activator.http.exchange import Exchange, Headers, now_us
from activator.limits.concurrency_limits import SharedCapacity
from activator.request.client_response import ClientResponse
from activator.request.inference_request import InferenceRequest
from activator.routing.policy.request_body import is_greedy
from activator.upstream.background_tasks import BackgroundTasks
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.degradation_steps import DEGRADED_HEADER, MAX_CACHED_AGE_S
from kelvin.contracts.timeline import Stage
from kelvin.process.loops import run_every
from kelvin.telemetry.policy.instruments import MetricsPage

CACHE_HEADER: Final = b"x-kelvin-cache"
ALLOW: Final = b"allow"
CACHED: Final = "cached"
PUBLISH_S: Final = 2.0  # far above the store's own deadline
# Headers of one request, which are never cached.
_REQUEST_HEADERS: Final = frozenset((b"x-request-id", b"x-client-request-id", b"connection", CACHE_HEADER))


class CachedResponse(NamedTuple):
    """A response from the cache, and its age."""

    content: StoredResponse
    age_s: float


class ResponseStore:
    """Keeps responses in an `AnswerStore`: seals each before storing it, and opens it after reading."""

    def __init__(
        self, secret: bytes, limits: AnswerStoreLimits, store: AnswerStore, background_tasks: BackgroundTasks
    ) -> None:
        self._secret = secret
        self._sealer = Sealer(secret)
        self.store = store
        self._background_tasks = background_tasks
        self.answer_bytes = limits.answer_bytes  # size limit of a cached body
        self.capacity = SharedCapacity(limits.nbytes, "the room for cached answers that are given", "bytes")

    def __repr__(self) -> str:
        return f"<ResponseStore {self.store!r}>"

    def derive_cache_key(self, request: InferenceRequest, version: str) -> AnswerKey | None:
        """Return the cache key of the request, or None if its answer may differ from one run to the next."""
        if not is_greedy(request.body, request.path):
            return None
        ceiling = ",".join(f"{name}={value}" for name, value in request.ceiling.headers())
        # the answer has the model's name; the body may not
        entry = request.entry
        names = (request.path, entry.tenant, entry.model, version, ceiling)
        parts = [*(each.encode() for each in names), request.body]
        return derive_answer_key(self._secret, request.account.principal.tenant, None, parts)

    async def find(self, answer_key: AnswerKey) -> CachedResponse | None:
        """Return the cached response, or None."""
        answer = await self.store.find(answer_key)
        content = None if answer is None else self._sealer.open(answer_key, answer.sealed)
        return None if answer is None or content is None else CachedResponse(content, answer.age_s)

    def store_soon(self, answer_key: AnswerKey, content: StoredResponse) -> None:
        """Store the response in a background task, unless it is too large. The request does not wait for it."""
        if len(content.body) <= self.answer_bytes:
            self._background_tasks.start(
                self.store.publish(answer_key, None, self._sealer.seal(answer_key, content)), PUBLISH_S
            )


class ResponseCache:
    """The response cache. Use from one event loop. Activators may share `store`. Answers for degradation are always
    local, because they serve when other parts are away.
    """

    def __init__(
        self,
        secret: bytes,
        store: AnswerStore,
        limits: AnswerStoreLimits,
        background_tasks: BackgroundTasks,
        page: MetricsPage,
    ) -> None:
        self._responses = ResponseStore(secret, limits, store, background_tasks)
        last = LocalAnswerStore(replace(limits, ttl_s=MAX_CACHED_AGE_S))
        # for `cached` degradation steps
        self.old_responses = ResponseStore(secret, limits, last, background_tasks)
        self._lookups = page.counter(
            "kelvin_cache_requests_total", "Requests that allow a cached answer, by result.", ("result",)
        )
        page.gauge("kelvin_cached_answer_bytes", "Bytes of cached answers, sealed.", self._nbytes)

    def __repr__(self) -> str:
        return f"<ResponseCache {self._responses!r} old={self.old_responses!r}>"

    def open(self, request: InferenceRequest, version: str) -> "CacheableRequest | None":
        """Return a `CacheableRequest` if request and answer allow caching, else None. Raises
        Refused(InvalidRequest).
        """
        value = request.exchange.header(CACHE_HEADER)
        if value is None:
            return None
        if value != ALLOW:
            raise Refused(InvalidRequest(CACHE_HEADER.decode(), f"({len(value)} bytes)", "must be allow"))
        answer_key = self._responses.derive_cache_key(request, version)
        if answer_key is None:
            self._lookups.add(("bypass",))
            return None
        return CacheableRequest(self._responses, answer_key, self._count_lookup)

    async def run(self) -> None:
        """Drop expired answers periodically until cancelled."""
        await run_every(MAINTAIN_S, self._maintain)

    async def _maintain(self) -> None:
        await self._responses.store.maintain()
        await self.old_responses.store.maintain()

    def _count_lookup(self, is_hit: bool) -> None:
        self._lookups.add(("hit" if is_hit else "miss",))

    def _nbytes(self) -> int:
        return self._responses.store.nbytes + self.old_responses.store.nbytes


class CacheableRequest:
    """A request that is answered from the cache, or whose response is added to it."""

    def __init__(
        self, responses: ResponseStore, answer_key: AnswerKey, on_lookup: Callable[[bool], None] = lambda _: None
    ) -> None:
        """`on_lookup` is called with whether a cached answer was found."""
        self._responses = responses
        self._answer_key = answer_key
        self._on_lookup = on_lookup
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._nbytes = 0
        self._is_whole = False

    async def try_answer(self, request: InferenceRequest, client_response: ClientResponse) -> bool:
        """Answer from the cache, or record the response for `keep`. Return whether it answered. Raises Refused,
        ClientGone.
        """
        cached = await self._responses.find(self._answer_key)
        with ExitStack() as stack:
            if cached is None or not self._try_hold_capacity(stack, cached.content, request):
                self._on_lookup(False)
                self.record_response(request.exchange, [(CACHE_HEADER, b"miss")])
                return False
            self._on_lookup(True)
            request.account.timeline.stamp(Stage.ROUTED, now_us())
            await replay(
                request.exchange,
                cached.content,
                [(CACHE_HEADER, b"hit")],
                lambda status: client_response.settle_replay(CACHED, status),
            )
        return True

    async def try_old_answer(
        self, request: InferenceRequest, client_response: ClientResponse, max_age_s: float
    ) -> bool:
        """Answer from the cache if the answer is at most `max_age_s` old: a degradation step. Return whether it was
        answered. Raises as `try_answer`.
        """
        cached = await self._responses.find(self._answer_key)
        if cached is None or cached.age_s > max_age_s:
            return False
        with ExitStack() as stack:
            if not self._try_hold_capacity(stack, cached.content, request):
                return False
            await client_response.stop_heartbeats()
            if request.exchange.has_started:
                return False
            account, age = request.account, int(cached.age_s)
            account.applied_step = AppliedStep("cached", "cached", f"cached={age}", account.model)
            account.timeline.stamp(Stage.ROUTED, now_us())
            extra_headers: Headers = [(DEGRADED_HEADER.encode(), b"cached"), (b"age", str(age).encode())]
            await replay(
                request.exchange,
                cached.content,
                extra_headers,
                lambda status: client_response.settle_replay(CACHED, status),
            )
        return True

    def record_response(self, exchange: Exchange, extra_headers: Headers) -> None:
        """Record the response for `keep` from now on, and add `extra_headers` to it."""
        exchange.tap_response(self._record_message, extra_headers)

    def keep(self, request: InferenceRequest) -> None:
        """Store the recorded response, if it is complete and correct. Call it after the response has ended."""
        account = request.account
        if self._is_whole and account.is_repeatable and self._status == 200:
            content = StoredResponse(account.request_id, self._status, self._headers, b"".join(self._parts))
            self._responses.store_soon(self._answer_key, content)

    def _try_hold_capacity(self, stack: ExitStack, content: StoredResponse, request: InferenceRequest) -> bool:
        """Count the answer's bytes until `stack` ends: they stay in memory until a slow client has read them. Return
        whether they fit. If not, a replica may still answer.
        """
        permit = self._responses.capacity.hold(request.account.principal.tenant, len(content.body))
        try:
            stack.enter_context(permit)
        except Refused:
            return False
        return True

    def _record_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [
                line
                for line in message["headers"]
                if line[0] not in _REQUEST_HEADERS and not line[0].startswith(RATE_LIMIT_PREFIX)
            ]
            return
        part = message.get("body", b"")
        self._nbytes += len(part)
        if self._nbytes > self._responses.answer_bytes:  # too large to be kept
            self._parts.clear()
            return
        self._parts.append(part)
        self._is_whole = not message.get("more_body", False)
