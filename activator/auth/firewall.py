"""Ask the operator's firewall about each request before its key is checked: one call over a Unix socket, bounded in
time.

The firewall gets method, path, address, and each header's name and length; never a header's value, the query, or the
body. A setting decides whether requests pass while the firewall does not answer.
"""

from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import aiohttp

from activator.accounting.metrics import RequestMetrics
from activator.http.exchange import Exchange
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import FirewallRefused
from kelvin.contracts.wire import Wire, decode, encode

ANSWER_BYTES: Final = 4096
CALLS: Final = 256  # concurrent calls; further ones wait within their time limit
_TYPE: Final = {"content-type": "application/json"}

Unanswered = Literal["refuse", "allow"]


class FirewallRequest(Wire, frozen=True):
    """Body of `POST /v1/verdict`. Non-ASCII bytes are decoded as Latin-1."""

    request_id: str
    method: str
    path: str  # as received, without the query
    address: str  # peer address of the socket
    headers: tuple[tuple[str, int], ...]  # lower-case name, and length of the value in bytes


class FirewallVerdict(Wire, frozen=True):
    """The response, with status 200. Anything else counts as no answer."""

    verdict: Literal["allow", "refuse"]


class _NoAnswer(Exception):
    """The firewall did not answer; the message is the metric's label."""


class Firewall:
    """Client of the firewall, with kept connections; the firewall may restart. Use as an async context manager."""

    def __init__(self, socket: Path, timeout_s: float, unanswered: Unanswered, metrics: RequestMetrics) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._unanswered = unanswered
        self._metrics = metrics
        connector = aiohttp.UnixConnector(path=str(socket), limit=CALLS)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    def __repr__(self) -> str:
        return f"<Firewall {self._socket} timeout_s={self._timeout_s} unanswered={self._unanswered}>"

    async def __aenter__(self) -> "Firewall":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def check(self, exchange: Exchange) -> None:
        """Return if the request may pass. Raises Refused(FirewallRefused), Refused(Unavailable), ClientGone."""
        try:
            with exchange.cancel_on_disconnect(self._timeout_s):
                verdict = await self._fetch_verdict(encode(firewall_request(exchange)))
        except TimeoutError:
            self._record_no_answer("late")
        except _NoAnswer as none:
            self._record_no_answer(str(none))
        else:
            self._metrics.count_firewall_verdict(verdict)
            if verdict == "refuse":
                raise Refused(FirewallRefused())

    def _record_no_answer(self, reason: str) -> None:
        self._metrics.count_firewall_verdict(reason)
        if self._unanswered == "refuse":
            raise Refused(Unavailable("the firewall"))

    async def _fetch_verdict(self, question: bytes) -> str:
        """Return the verdict. Raises _NoAnswer. Retries once if a kept connection turns out to be closed."""
        try:
            try:
                return await self._post_once(question)
            except aiohttp.ServerDisconnectedError:
                return await self._post_once(question)
        except (Refused, aiohttp.ClientResponseError):
            raise _NoAnswer("garbage") from None
        except (aiohttp.ClientError, OSError):
            raise _NoAnswer("away") from None

    async def _post_once(self, question: bytes) -> str:
        """Send the request once, without a time limit. Raises aiohttp's errors, Refused for an invalid verdict."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.post(
            "http://firewall/v1/verdict", data=question, headers=_TYPE, timeout=timeout, allow_redirects=False
        ) as answer:
            raw = bytearray()
            async for part in answer.content.iter_any():
                raw += part
                if len(raw) > ANSWER_BYTES:
                    raise _NoAnswer("garbage")
            if answer.status != 200:
                raise _NoAnswer("garbage")
            return decode(raw, FirewallVerdict, field="the firewall's verdict").verdict


def firewall_request(exchange: Exchange) -> FirewallRequest:
    """Return what the firewall may know of the request."""
    return FirewallRequest(
        request_id=exchange.request_id,
        method=exchange.method,
        path=exchange.path.decode("latin-1"),
        address=exchange.peer,
        headers=tuple((name.decode("latin-1"), len(value)) for name, value in exchange.headers),
    )
