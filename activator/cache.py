"""Answers that are given again to whoever of a tenant asks the same within a short time, and asks for that.

Only where the answer depends on what was asked alone: the caller said `"temperature": 0`, and the version is the same
one. Kept in this process, sealed as answers of a key are; who asks meanwhile runs, too.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.types import Message

from activator.account import OK
from activator.answer import Answer
from activator.call import Call
from activator.exchange import Exchange, Headers, now_us
from activator.once_key import Content, Sealer
from activator.policy.body import is_greedy
from activator.policy.once import Asked, Kept, OnceLimits, Shelf, asked
from activator.tape import OF_THE_MOMENT, play, recorded
from contracts.errors import InvalidRequest, Refused
from contracts.timeline import Stage
from telemetry.policy.instruments import Page

HEADER: Final = b"x-kelvin-cache"
ALLOW: Final = b"allow"
CACHED: Final = "cached"
TIDY_S: Final = 30.0
# Of one request alone: never part of what another one gets.
_OWN: Final = frozenset((b"x-request-id", b"x-client-request-id", b"connection", HEADER))


class ResponseCache:
    """Used on one event loop."""

    def __init__(
        self, secret: bytes, limits: OnceLimits, page: Page, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._secret = secret
        self._sealer = Sealer(secret)
        self._limits = limits
        self._shelf = Shelf(limits)
        self._clock = clock
        self._asked = page.counter(
            "kelvin_cache_requests_total", "Requests that allow a cached answer, by what came of it.", ("result",)
        )
        page.gauge("kelvin_cached_answer_bytes", "Bytes of cached answers, sealed.", lambda: self._shelf.nbytes)

    def __repr__(self) -> str:
        return f"<ResponseCache {self._shelf!r}>"

    def open(self, call: Call, version: str) -> "Caching | None":
        """For a request that allows it, and whose answer may be kept. Raises Refused(InvalidRequest)."""
        value = call.exchange.header(HEADER)
        if value is None:
            return None
        if value != ALLOW:
            raise Refused(InvalidRequest(HEADER.decode(), f"({len(value)} bytes)", "must be allow"))
        if not is_greedy(call.body, call.path):
            self._asked.add(("bypass",))
            return None
        ceiling = ",".join(f"{name}={value}" for name, value in call.ceiling.headers())
        what = (call.path.encode(), call.entry.tenant.encode(), version.encode(), ceiling.encode(), call.body)
        return Caching(self, asked(self._secret, call.account.principal.tenant, b"cache", what))

    def find(self, what: Asked) -> Content | None:
        """What is kept, whole."""
        kept = self._shelf.find(what.tenant, what.fingerprint, self._clock())
        content = None if kept is None else self._sealer.open(what, kept.sealed)
        self._asked.add(("miss" if content is None else "hit",))
        return content

    def put(self, what: Asked, content: Content) -> None:
        """Keep it, where it is not too large."""
        if len(content.body) <= self._limits.answer_bytes:
            sealed = self._sealer.seal(what, content.request_id, content.status, content.headers, content.body)
            self._shelf.put(what.tenant, what.fingerprint, Kept(what.fingerprint, sealed), self._clock())

    async def run(self) -> None:
        """Forget what has ended, also while nobody asks."""
        while True:
            await asyncio.sleep(TIDY_S)
            self._shelf.tidy(self._clock())


class Caching:
    """One request that may be answered out of the cache, or fills it."""

    def __init__(self, cache: ResponseCache, what: Asked) -> None:
        self._cache = cache
        self._what = what
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._is_whole = False

    async def try_answer(self, exchange: Exchange, call: Call, answer: Answer) -> bool:
        """Whether it was answered; otherwise what goes to the client is overheard. Raises Refused, ClientGone."""
        content = self._cache.find(self._what)
        if content is None:
            exchange.overhear(self._hear, [(HEADER, b"miss")])
            return False
        marks: Headers = [(HEADER, b"hit"), (b"x-kelvin-repeat-of", content.request_id.encode())]
        tape = await recorded(content.status, content.headers, content.body)
        call.account.timeline.stamp(Stage.ROUTED, now_us())
        with tape.listening() as listener:
            await play(exchange, listener, marks, lambda status: answer.repeated(CACHED, status))
        return True

    def keep(self, call: Call) -> None:
        """After the end: keep a right answer."""
        account = call.account
        if self._is_whole and account.outcome == OK and account.is_recorded and self._status == 200:
            content = Content(account.request_id, self._status, self._headers, b"".join(self._parts))
            self._cache.put(self._what, content)

    def _hear(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [
                line for line in message["headers"] if line[0] not in _OWN and not line[0].startswith(OF_THE_MOMENT)
            ]
            return
        self._parts.append(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
