"""Calls to another process of ours: JSON both ways, failures as facts. `call` has a deadline, `open` may have one."""

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
from kelvin.process.request_context import headers as told

log = logging.getLogger(__name__)

T = TypeVar("T")


class ServiceClient:
    """One peer. Connections are kept; the peer may restart at any time. Close it where you opened it."""

    def __init__(self, directory: SocketDirectory, name: str, peer: str, *, limit: int = 64) -> None:
        """By its socket in the run directory."""
        self._begin(SocketConnector(directory.address(name)), peer, limit)

    @classmethod
    def from_connector(cls, way: Connector, peer: str, *, limit: int = 64) -> Self:
        """Wherever it is."""
        made = cls.__new__(cls)
        made._begin(way, peer, limit)
        return made

    def _begin(self, way: Connector, peer: str, limit: int) -> None:
        self._peer = peer
        self.base_url = way.base_url  # what URLs of `session` begin with
        self.session = aiohttp.ClientSession(connector=way.connector(limit), auto_decompress=False)

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
        """Decode the answer as `kind` (`type(None)` for an empty one).

        Raises Refused: the peer's failure; Internal if its error says none, or if a successful answer does not decode;
        Unavailable if the peer can't be reached or does not answer within `timeout_s`.
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
        """Yield a successful answer, whose body the caller reads; `timeout_s` covers the body too.

        Raises Refused as `call` does. While the body is read, aiohttp's errors are the caller's to translate.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=5.0)
        try:
            request = self.session.request(
                method, self.base_url + path, data=payload, headers=told(headers), timeout=timeout
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
        """Ends kept connections."""
        await self.session.close()


async def _decode_failure(answer: aiohttp.ClientResponse) -> RemoteFailure | Internal:
    try:
        return from_problem(await answer.read()) or Internal()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Internal()
