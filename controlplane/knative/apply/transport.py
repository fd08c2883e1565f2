"""HTTP to an API server, by the `kubernetes` library: where it is, who we are, and what goes wrong in our own words.

Nothing is repeated here but what met a connection that the server had just closed, and what it refused because it did
not know us: credentials on disk are read again for that.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.config import ConfigException

from controlplane import dependencies
from controlplane.knative.apply.api_errors import failure_from_response, one_line
from controlplane.knative.apply.cluster import ClusterError, Json, Unreachable, api_timeout
from kelvin.contracts.wire import BadJson, decode_any

USER_AGENT: Final = "kelvin-controlplane"
JSON: Final = "application/json"
LINE_BYTES: Final = 16 << 20  # one object; it is at most some MiB where it is stored
ANSWER_BYTES: Final = 128 << 20  # one page of a list
CONNECTION_FIELDS: Final = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name", "proxy")
RELOAD_S: Final = 10.0  # credentials that are not known there are not read again sooner

Query = list[tuple[str, str]]
LoadConfiguration = Callable[[Configuration], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Query
    body: Json | None = None
    content_type: str = JSON
    accept: str = JSON


class Transport:
    """One API server. `load` fills in where it is and who we are, and is asked again when we are not known there."""

    def __init__(self, load: LoadConfiguration) -> None:
        self._load = load
        self._client: ApiClient | None = None
        self._loaded_at = 0.0
        self._loading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Transport {'unconnected' if self._client is None else self._client.configuration.host}>"

    async def connect(self) -> None:
        """Read the configuration; nothing is sent. Raises ClusterError where there is none."""
        await self._ensure_client()

    async def close(self) -> None:
        """End its connections. It may be used again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def send_request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Json | None = None,
        *,
        limit_s: float,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Json:
        """The object answered. Raises ClusterError. Cut short, it may have been done all the same."""
        request = _Request(method, path, query or [], body, content_type, accept)
        timeout = aiohttp.ClientTimeout(total=None)  # ours is of all of it, the configuration and a second try included
        async with api_timeout(limit_s), self._open_response(request, timeout) as answer:
            return _object(await _read(answer))

    @asynccontextmanager
    async def lines(self, path: str, query: Query, *, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Lines of an answer that goes on, until it ends. Raises ClusterError, also when nothing comes for so long."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=dependencies.CLUSTER.timeout_s, sock_read=silence_s)
        async with self._open_response(_Request("GET", path, query), timeout) as answer:
            yield _lines(answer.content)

    @asynccontextmanager
    async def _open_response(
        self, request: _Request, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        answer = await self._send(request, timeout)
        try:
            if answer.status == 401 and await self._reload():
                answer.release()
                answer = await self._send(request, timeout)
            if answer.status >= 300:
                raise ClusterError(
                    failure_from_response(answer.status, await _read(answer), answer.headers.get("Retry-After"))
                )
            yield answer
        finally:
            connection = answer.connection
            if connection is not None and connection.transport is not None:
                # The answer is not complete, so the connection can't be used again. Over TLS, closing it would wait
                # for the server, perhaps until our event loop has ended.
                connection.transport.abort()
            answer.release()

    async def _send(self, request: _Request, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        async def once() -> aiohttp.ClientResponse:
            client = await self._ensure_client()
            method, url, headers, sent, _ = await client.param_serialize(
                request.method,
                request.path,
                query_params=request.query,
                header_params={"Accept": request.accept, "Content-Type": request.content_type},
                body=request.body,
                auth_settings=["BearerToken"],
            )
            found = await client.call_api(method, url, headers, sent, _request_timeout=timeout)
            response: aiohttp.ClientResponse = found.response
            return response

        with _translate_errors():
            try:
                return await once()
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                if request.method != "PATCH":  # the others are repeated by aiohttp where that is safe
                    raise
                return await once()

    async def _ensure_client(self) -> ApiClient:
        async with self._loading:
            if self._client is None:
                self._client = _client(await self._load_configuration())
            return self._client

    async def _load_configuration(self) -> Configuration:
        configuration = Configuration()
        with _translate_errors():
            await self._load(configuration)
        self._loaded_at = asyncio.get_running_loop().time()
        return configuration

    async def _reload(self) -> bool:
        """With the credentials that are on disk by now. False where they were read a moment ago."""
        async with self._loading:
            if self._client is None or asyncio.get_running_loop().time() - self._loaded_at < RELOAD_S:
                return False
            new, old = await self._load_configuration(), self._client
            if all(getattr(new, each) == getattr(old.configuration, each) for each in CONNECTION_FIELDS):
                old.configuration.api_key = new.api_key  # watches go on
                old.configuration.refresh_api_key_hook = new.refresh_api_key_hook
                return True
            self._client = _client(new)
        await old.close()  # watches are begun again
        return True


def _client(configuration: Configuration) -> ApiClient:
    with _translate_errors():
        client = ApiClient(configuration)
    client.user_agent = USER_AGENT
    return client


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ClusterError(Unreachable("no answer in time")) from None
    except ConfigException as error:
        raise ClusterError(Unreachable(one_line(f"no configuration of a cluster: {error}"))) from error
    except (aiohttp.ClientError, ApiException, OSError) as error:
        raise ClusterError(Unreachable(one_line(f"{type(error).__name__}: {error}"))) from error


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    with _translate_errors():
        async for piece in answer.content.iter_any():
            raw += piece
            if len(raw) > ANSWER_BYTES:
                raise ClusterError(Unreachable(f"an answer of more than {ANSWER_BYTES} bytes"))
    return bytes(raw)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The reader's own bound of a line is less than an object may have."""
    held = bytearray()
    while True:
        with _translate_errors():
            piece = await content.readany()
        if not piece:
            return
        held += piece
        *whole, rest = held.split(b"\n") if b"\n" in piece else (held,)
        held = rest
        for each in whole:
            if each.strip():
                yield bytes(each)
        if len(held) > LINE_BYTES:
            raise ClusterError(Unreachable(f"a line of more than {LINE_BYTES} bytes"))


def _object(raw: bytes) -> Json:
    try:
        told = decode_any(raw)
    except BadJson:
        told = None
    if not isinstance(told, dict):
        raise ClusterError(Unreachable(one_line(f"not an object: {raw[:80].decode(errors='replace')}")))
    return told
