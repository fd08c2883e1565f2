"""HTTP to an API server with the `kubernetes` library: address, credentials, and errors as `ClusterError`.

A request is repeated in two cases only: the server had just closed the connection, or it answered 401. After a 401, the
credentials are read from disk again.
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
LINE_BYTES: Final = 16 << 20  # one object; stored objects have at most some MiB
ANSWER_BYTES: Final = 128 << 20  # one page of a list
CONNECTION_FIELDS: Final = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name", "proxy")
RELOAD_S: Final = 10.0  # shortest time between two reloads of rejected credentials

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
    """Connection to one API server. `load` fills in address and credentials; it is called again after a 401."""

    def __init__(self, load: LoadConfiguration) -> None:
        self._load = load
        self._client: ApiClient | None = None
        self._loaded_at = 0.0
        self._loading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Transport {'unconnected' if self._client is None else self._client.configuration.host}>"

    async def connect(self) -> None:
        """Read the configuration without sending anything. Raises ClusterError if there is none."""
        await self._ensure_client()

    async def close(self) -> None:
        """Close the connections. The transport can be used again."""
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
        """Return the response's object. Raises ClusterError. If cancelled, the request may have been carried out."""
        request = _Request(method, path, query or [], body, content_type, accept)
        timeout = aiohttp.ClientTimeout(total=None)  # `limit_s` covers all, a configuration and a second try included
        async with api_timeout(limit_s), self._open_response(request, timeout) as response:
            return _object(await _read(response))

    @asynccontextmanager
    async def stream_lines(self, path: str, query: Query, *, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the lines of a streaming response. Raises ClusterError, also after `silence_s` without data."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=dependencies.CLUSTER.timeout_s, sock_read=silence_s)
        async with self._open_response(_Request("GET", path, query), timeout) as response:
            yield _lines(response.content)

    @asynccontextmanager
    async def _open_response(
        self, request: _Request, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await self._send(request, timeout)
        try:
            if response.status == 401 and await self._reload():
                response.release()
                response = await self._send(request, timeout)
            if response.status >= 300:
                raise ClusterError(
                    failure_from_response(response.status, await _read(response), response.headers.get("Retry-After"))
                )
            yield response
        finally:
            connection = response.connection
            if connection is not None and connection.transport is not None:
                # The response is incomplete, so the connection can't be reused. Over TLS, closing it would wait for the
                # server, perhaps until our event loop has ended.
                connection.transport.abort()
            response.release()

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
                if request.method != "PATCH":  # aiohttp repeats the others where that is safe
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
        """Read the credentials on disk again. Return False if they were read less than RELOAD_S ago."""
        async with self._loading:
            if self._client is None or asyncio.get_running_loop().time() - self._loaded_at < RELOAD_S:
                return False
            new, old = await self._load_configuration(), self._client
            if all(getattr(new, each) == getattr(old.configuration, each) for each in CONNECTION_FIELDS):
                old.configuration.api_key = new.api_key  # watches continue
                old.configuration.refresh_api_key_hook = new.refresh_api_key_hook
                return True
            self._client = _client(new)
        await old.close()  # watches start again
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


async def _read(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    with _translate_errors():
        async for piece in response.content.iter_any():
            raw += piece
            if len(raw) > ANSWER_BYTES:
                raise ClusterError(Unreachable(f"an answer of more than {ANSWER_BYTES} bytes"))
    return bytes(raw)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Split a stream into lines. aiohttp's own limit for a line is smaller than an object may be."""
    buffer = bytearray()
    while True:
        with _translate_errors():
            piece = await content.readany()
        if not piece:
            return
        buffer += piece
        *whole, remainder = buffer.split(b"\n") if b"\n" in piece else (buffer,)
        buffer = remainder
        for each in whole:
            if each.strip():
                yield bytes(each)
        if len(buffer) > LINE_BYTES:
            raise ClusterError(Unreachable(f"a line of more than {LINE_BYTES} bytes"))


def _object(raw: bytes) -> Json:
    try:
        decoded = decode_any(raw)
    except BadJson:
        decoded = None
    if not isinstance(decoded, dict):
        raise ClusterError(Unreachable(one_line(f"not an object: {raw[:80].decode(errors='replace')}")))
    return decoded
