"""An issuer's public keys, fetched over HTTPS at an interval, and when a token names an unknown key.

While the issuer does not answer, the last keys are used up to a maximum age. One loop fetches. A request that needs an
unknown key waits for the next fetch. During the pause after a fetch it gets its answer at once.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Final

import aiohttp
import jwt

from activator import dependencies
from activator.auth.issuers import KeySetSource
from activator.auth.key_set_policy import Jwk, KeyName, usable_keys
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.wire import decode_any

log = logging.getLogger(__name__)

PAUSE_S: Final = 10.0  # shortest interval between two fetches
FETCH_S: Final = dependencies.ISSUER.timeout_s
MAX_BYTES: Final = 256 << 10
MAX_WAITING: Final = 1024  # waiting requests per issuer: they are not authenticated, so their number is bounded


class KeySet:
    """The keys of one issuer. Only `run` changes them."""

    def __init__(self, session: aiohttp.ClientSession, source: KeySetSource, algorithms: frozenset[str]) -> None:
        self._session = session
        self._source = source
        self._algorithms = algorithms
        self._jwks: dict[KeyName, Jwk] = {}
        self._keys: dict[KeyName, jwt.PyJWK] = {}
        self._fetched_s: float | None = None  # on the event loop's clock
        self._is_pausing = False
        self._waiting = 0
        self._fetch_wanted, self._fetch_ended = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        return f"<KeySet {self._source.url} keys={len(self._keys)} age={self.age_s():.0f} s>"

    def age_s(self) -> float:
        """Return the seconds since the last successful fetch; inf before the first one."""
        if self._fetched_s is None:
            return float("inf")
        return asyncio.get_running_loop().time() - self._fetched_s

    def find_loaded(self, name: KeyName) -> jwt.PyJWK | None:
        """Return the key of that name, if known and not too old. The same object while its bytes are the same."""
        return self._keys.get(name) if self.age_s() <= self._source.max_age_s else None

    async def find(self, name: KeyName) -> jwt.PyJWK | None:
        """Return the key of that name, after a fetch if it is unknown. Raises Refused(Unavailable) if the last fetch is
        too long ago, or if MAX_WAITING calls wait.
        """
        if (key := self.find_loaded(name)) is not None:
            return key
        if not self._is_pausing:
            if self._waiting >= MAX_WAITING:
                raise Refused(Unavailable("the issuer of the token"))
            self._fetch_wanted.set()
            self._waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FETCH_S + 1):
                        await self._fetch_ended.wait()
            finally:
                self._waiting -= 1
        if self.age_s() > self._source.max_age_s:
            raise Refused(Unavailable("the issuer of the token"))
        return self.find_loaded(name)

    async def run(self) -> None:
        """Fetch keys periodically and on demand, until cancelled."""
        while True:
            self._fetch_wanted.clear()
            succeeded = await self._fetch()
            self._is_pausing = True
            fetch_ended, self._fetch_ended = self._fetch_ended, asyncio.Event()
            fetch_ended.set()
            await asyncio.sleep(PAUSE_S)
            self._is_pausing = False
            if succeeded:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._source.refresh_s - PAUSE_S):
                        await self._fetch_wanted.wait()

    async def _fetch(self) -> bool:
        try:
            jwks = usable_keys(decode_any(await self._load()), self._algorithms)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            cause = str(error) or type(error).__name__
            log.warning("an issuer's keys can't be fetched", extra={"url": self._source.url, "error": cause[:400]})
            return False
        unchanged = {name: key for name, key in self._keys.items() if self._jwks.get(name) == jwks.get(name)}
        self._keys = {name: key for name, jwk in jwks.items() if (key := unchanged.get(name) or _load_key(name, jwk))}
        self._jwks = jwks
        self._fetched_s = asyncio.get_running_loop().time()
        return True

    async def _load(self) -> bytes:
        """Return the document. Redirects are refused, because only the configured URL is trusted for keys."""
        timeout = aiohttp.ClientTimeout(total=FETCH_S)
        async with self._session.get(
            self._source.url, ssl=self._source.tls, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                raise ValueError(f"the answer is {answer.status}")
            content = bytearray()
            async for part in answer.content.iter_any():
                content += part
                if len(content) > MAX_BYTES:
                    raise ValueError(f"the answer is over {MAX_BYTES} bytes")
            return bytes(content)


def _load_key(name: KeyName, jwk: Jwk) -> jwt.PyJWK | None:
    kid, algorithm = name
    try:
        return jwt.PyJWK(dict(jwk), algorithm=algorithm)
    except (jwt.PyJWTError, ValueError) as error:
        log.warning("an issuer's key can't be used", extra={"kid": kid[:80], "error": str(error)[:400]})
        return None
