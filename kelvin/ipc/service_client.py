"""Call another process of ours over HTTP with JSON. `call` has a deadline; `open` streams and may have one.

Failures are raised as Refused.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import aiohttp

from kelvin.contracts.errors import Internal, Refused, RemoteFailure, Unavailable
from kelvin.contracts.problem import from_problem
from kelvin.contracts.wire import BadJson, decoder, encode
from kelvin.ipc.connector import Connector, SocketConnector
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.request_context import context_headers

log = logging.getLogger(__name__)

T = TypeVar("T")


class ServiceClient:
    """HTTP client of one peer. Keeps connections open; the peer may restart at any time. The creator closes it."""

    def __init__(self, directory: SocketDirectory, name: str, peer: str, *, limit: int = 64) -> None:
        """Connect to the peer's socket in the run directory."""
        self._begin(SocketConnector(directory.address(name)), peer, limit)

    @classmethod
    def from_connector(cls, connector: Connector, peer: str, *, limit: int = 64) -> Self:
        """Return a client that uses this connector."""
        made = cls.__new__(cls)
        made._begin(connector, peer, limit)
        return made

    def _begin(self, connector: Connector, peer: str, limit: int) -> None:
        self._peer = peer
        self.base_url = connector.base_url  # prefix of the URLs of `session`
        self.session = aiohttp.ClientSession(connector=connector.aiohttp_connector(limit), auto_decompress=False)

    def __repr__(self) -> str:
        return f"<ServiceClient {self._peer}>"

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object | None = None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Call the peer and decode the response as `kind` (`type(None)` for an empty one).

        Raises Refused: the peer's failure; Internal if an error response holds none, or a successful one does not
        decode; Unavailable if the peer can't be reached or does not answer within `timeout_s`.
        """
        payload = None if body is None else encode(body)
        async with self.open(method, path, payload=payload, timeout_s=timeout_s, headers=headers) as answer:
            try:
                raw = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Refused(Unavailable(self._peer)) from error
        try:
            return decoder(kind).decode(raw or b"null")
        except BadJson as error:
            log.error("an answer does not decode", extra={"peer": self._peer, "path": path, "error": str(error)})
            raise Refused(Internal()) from error

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        payload: bytes | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful response, whose body the caller reads. `timeout_s` covers the body too. Raises Refused as
        `call` does. While the body is read, the caller must handle aiohttp's errors.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=5.0)
        try:
            request = self.session.request(
                method, self.base_url + path, data=payload, headers=context_headers(headers), timeout=timeout
            )
            answer = await request.__aenter__()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Refused(Unavailable(self._peer)) from error
        try:
            if answer.status >= 400:
                raise Refused(await _decode_failure(answer))
            yield answer
        finally:
            answer.close() if not answer.content.at_eof() else answer.release()

    async def close(self) -> None:
        """Close the session and all its connections."""
        await self.session.close()


async def _decode_failure(answer: aiohttp.ClientResponse) -> RemoteFailure | Internal:
    try:
        return from_problem(await answer.read()) or Internal()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Internal()
