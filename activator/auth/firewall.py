"""Ask a firewall of the operator's before anybody looks at a key: one call over a Unix socket, bounded in time.

It is told who asks for what, and which headers there are with how many bytes each; never a header's value, a query or
a byte of the body. What may pass without its word is the operator's to set.
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
CALLS: Final = 256  # at once; who is further waits for a place within its time
_TYPE: Final = {"content-type": "application/json"}

Unanswered = Literal["refuse", "allow"]


class FirewallRequest(Wire, frozen=True):
    """Body of `POST /v1/verdict`. Bytes that are no ASCII stand as the characters of Latin-1 with their numbers."""

    request_id: str
    method: str
    path: str  # as it came, without the query
    address: str  # the socket's
    headers: tuple[tuple[str, int], ...]  # each one's name in lower case, and the bytes of its value


class FirewallVerdict(Wire, frozen=True):
    """The answer, with status 200. Anything else is none."""

    verdict: Literal["allow", "refuse"]


class _NoAnswer(Exception):
    """Why there is none, as it is counted."""


class Firewall:
    """Connections are kept; the other side may restart at any time. `async with` it."""

    def __init__(self, socket: Path, within_s: float, unanswered: Unanswered, metrics: RequestMetrics) -> None:
        self._socket = socket
        self._within_s = within_s
        self._unanswered = unanswered
        self._metrics = metrics
        connector = aiohttp.UnixConnector(path=str(socket), limit=CALLS)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    def __repr__(self) -> str:
        return f"<Firewall {self._socket} within_s={self._within_s} unanswered={self._unanswered}>"

    async def __aenter__(self) -> "Firewall":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def check(self, exchange: Exchange) -> None:
        """Return where it may pass. Raises Refused: FirewallRefused, Unavailable without an answer; ClientGone."""
        try:
            with exchange.cancel_on_disconnect(self._within_s):
                verdict = await self._ask(encode(question_of(exchange)))
        except TimeoutError:
            self._without("late")
        except _NoAnswer as none:
            self._without(str(none))
        else:
            self._metrics.firewall(verdict)
            if verdict == "refuse":
                raise Refused(FirewallRefused())

    def _without(self, why: str) -> None:
        self._metrics.firewall(why)
        if self._unanswered == "refuse":
            raise Refused(Unavailable("the firewall"))

    async def _ask(self, question: bytes) -> str:
        """Raises _NoAnswer. A kept connection that has ended meanwhile says nothing yet: it is asked a second time."""
        try:
            try:
                return await self._put(question)
            except aiohttp.ServerDisconnectedError:
                return await self._put(question)
        except (Refused, aiohttp.ClientResponseError):
            raise _NoAnswer("garbage") from None
        except (aiohttp.ClientError, OSError):
            raise _NoAnswer("away") from None

    async def _put(self, question: bytes) -> str:
        """Bounded by the caller's time alone. Raises aiohttp's errors, and Refused for what is no verdict."""
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
            return decode(raw, FirewallVerdict, what="the firewall's verdict").verdict


def question_of(exchange: Exchange) -> FirewallRequest:
    """All that it is told."""
    return FirewallRequest(
        request_id=exchange.request_id,
        method=exchange.method,
        path=exchange.path.decode("latin-1"),
        address=exchange.peer,
        headers=tuple((name.decode("latin-1"), len(value)) for name, value in exchange.headers),
    )
