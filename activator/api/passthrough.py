"""Pass the admin and push APIs through to internal services. Bodies are streamed; the caller is authenticated here."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import aiohttp
from yarl import URL

from activator import dependencies
from activator.auth.authenticator import Authenticator
from activator.http.exchange import ClientGone, Exchange, Headers, RequestLimits
from kelvin.contracts.errors import BodyTooLarge, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient

MIN_TIMEOUT_S: Final = 0.001
PRINCIPAL_HEADER: Final = b"x-kelvin-principal"
CALLS_OF_TENANT: Final = 64  # concurrent calls per API
CONNECT_S: Final = {"admin": dependencies.ADMIN.timeout_s, "push": dependencies.PUSH.timeout_s}
# A key needs one of these scopes for any route. The service checks which scope each route needs.
SCOPES: Final = {"admin": (Scope.ADMIN, Scope.BILLING_READ), "push": (Scope.PUSH,)}
# Hop-by-hop headers (RFC 9110, 7.6.1), headers set again for this hop, and headers for the activator alone.
_DROPPED_REQUEST_HEADERS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"upgrade",
     b"transfer-encoding", b"host", b"expect", b"authorization", b"x-request-id", b"cookie")
)  # fmt: skip
_DROPPED_RESPONSE_HEADERS: Final = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "x-request-id", "date")
)


class Passthrough:
    """Forwards calls to `services`, by the first part of the path. Their clients must have no connection limit: a call
    holds a connection as long as its caller sends or reads.
    """

    def __init__(
        self, authenticator: Authenticator, services: Mapping[str, ServiceClient], limits: RequestLimits
    ) -> None:
        self._authenticator = authenticator
        self._services = services
        self._limits = limits
        self._running_calls: Counter[tuple[str, str]] = Counter()  # running calls, by service and tenant

    async def serve(self, exchange: Exchange, service: str) -> None:
        """Forward a call. Raises Refused before the response has begun, ClientGone."""
        principal = await self._authenticator.authenticate(exchange, *SCOPES[service])
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in _request_headers(exchange.headers)
        ]
        headers.append((PRINCIPAL_HEADER.decode(), encode(principal).decode()))
        headers.append(("x-request-id", exchange.request_id))
        exchange.check_length(self._limits.upload_bytes)
        upload = _Upload(exchange, self._limits) if exchange.has_more else None
        with self._count_call(service, principal.tenant), exchange.cancel_on_disconnect():
            await self._forward(exchange, self._services[service], service, headers, upload)

    @contextmanager
    def _count_call(self, service: str, tenant: str) -> Iterator[None]:
        """Count a call until the block ends. Raises Refused(Overloaded)."""
        caller = service, tenant
        if self._running_calls[caller] >= CALLS_OF_TENANT:
            raise Refused(Overloaded(f"this tenant's calls of the {service} API", CALLS_OF_TENANT, 1.0))
        self._running_calls[caller] += 1
        try:
            yield
        finally:
            self._running_calls[caller] -= 1
            if not self._running_calls[caller]:
                del self._running_calls[caller]

    async def _forward(
        self,
        exchange: Exchange,
        service: ServiceClient,
        name: str,
        headers: list[tuple[str, str]],
        body: "_Upload | None",
    ) -> None:
        query = b"?" + exchange.query if exchange.query else b""
        # `encoded`: the path is forwarded unchanged; ".." in it has no meaning.
        url = URL(service.base_url + (exchange.path + query).decode("latin-1"), encoded=True)
        remaining_s = exchange.deadline(self._limits.deadline_s).remaining_s(time.monotonic())
        allowed_s = max(MIN_TIMEOUT_S, remaining_s)  # 0 would mean no timeout
        connect_s = CONNECT_S[name]
        timeout = aiohttp.ClientTimeout(total=allowed_s, sock_connect=connect_s)
        try:
            async with service.session.request(
                exchange.method, url, headers=headers, data=None if body is None else body.parts(), timeout=timeout,
                allow_redirects=False,
            ) as answer:  # fmt: skip
                await self._stream_response(exchange, answer)
        except aiohttp.ConnectionTimeoutError as error:  # the caller's deadline has not passed
            raise Refused(Unavailable(f"the {name} service")) from error
        except TimeoutError:
            if exchange.has_started:
                raise ClientGone from None  # only a broken connection shows that the body is incomplete
            raise Refused(DeadlineExceeded(allowed_s, f"waiting for the {name} service")) from None
        except (aiohttp.ClientError, OSError) as error:
            if body is not None and body.failure is not None:
                raise body.failure from error
            if exchange.has_started:
                raise ClientGone from error
            raise Refused(Unavailable(f"the {name} service")) from error

    async def _stream_response(self, exchange: Exchange, answer: aiohttp.ClientResponse) -> None:
        headers: Headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.items()
            if name.lower() not in _DROPPED_RESPONSE_HEADERS and not name.lower().startswith("x-kelvin-")
        ]
        await exchange.start(answer.status, headers)
        async for data in answer.content.iter_any():
            await exchange.write(data)
        await exchange.finish(b"")


class _Upload:
    """The request's body on its way in: limited in bytes, each part in time, read as fast as it is forwarded."""

    def __init__(self, exchange: Exchange, limits: RequestLimits) -> None:
        self._exchange = exchange
        self._limits = limits
        self.failure: Refused | ClientGone | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts as they arrive. Raises Refused, ClientGone, and keeps what it raises in `failure`."""
        size = 0
        try:
            while self._exchange.has_more:
                async with asyncio.timeout(self._limits.body_s):
                    part = await self._exchange.receive()
                size += len(part)
                if size > self._limits.upload_bytes:
                    raise Refused(BodyTooLarge(self._limits.upload_bytes))
                yield part
        except TimeoutError:
            self.failure = Refused(DeadlineExceeded(self._limits.body_s, "reading the request's body"))
            raise self.failure from None
        except (Refused, ClientGone) as failure:
            self.failure = failure
            raise


def _request_headers(headers: Headers) -> Headers:
    connections = [value for name, value in headers if name == b"connection"]
    hop_by_hop = {token.strip().lower() for value in connections for token in value.split(b",")}
    return [
        (name, value)
        for name, value in headers
        if name not in _DROPPED_REQUEST_HEADERS and name not in hop_by_hop and not name.startswith(b"x-kelvin-")
    ]
