"""`CachedAnswers` of several activators over one store: the same sealed bytes for all. While it is away nothing is
found, and nothing kept: who asks runs, as with an empty cache.
"""

from contextlib import suppress
from typing import Final

from activator.asking import Keeps
from activator.cached_answers import Found
from activator.errands import Errands
from activator.policy.once import ENTRY_BYTES, Asked, OnceLimits
from activator.shared_answers import KEEP
from activator.shared_rates import Away

PUT_S: Final = 2.0  # the store's own deadline is far below it

FIND: Final = """
local sealed = redis.call('HGET', KEYS[1], 'sealed')
if not sealed then return {} end
return {sealed, redis.call('PTTL', KEYS[1])}
"""


class SharedCached:
    """Used on one event loop. `close` before the store."""

    nbytes: Final = 0  # what there is lies in the store

    def __init__(self, store: Keeps, limits: OnceLimits) -> None:
        self._store = store
        self._limits = limits
        self._errands = Errands()

    def __repr__(self) -> str:
        return f"<SharedCached {self._errands!r}>"

    async def find(self, asked: Asked) -> Found | None:
        """See `CachedAnswers`. Nobody waits for what is known to be away."""
        if not self._store.is_up:
            return None
        try:
            there = await self._store.ask(FIND, (_entry(asked),))
        except Away:
            return None
        if not there:
            return None
        sealed, left_ms = there
        return Found(sealed, max(0.0, self._limits.ttl_s - int(left_ms) / 1000))

    def put(self, asked: Asked, sealed: bytes) -> None:
        """See `CachedAnswers`. The request that it is of does not wait for it."""
        size = len(sealed) + ENTRY_BYTES
        if self._store.is_up and size <= self._limits.tenant_bytes:
            self._errands.start(self._put(asked, sealed, size), PUT_S)

    def tidy(self) -> None:
        """It ends by itself."""

    async def close(self) -> None:
        """Once what is being kept is."""
        await self._errands.close()

    async def _put(self, asked: Asked, sealed: bytes, size: int) -> None:
        of_tenant, limits = _of(asked), self._limits
        with suppress(Away):
            await self._store.keep(
                KEEP, (_entry(asked), f"{of_tenant}-ends", f"{of_tenant}-sizes"), size, b"", asked.fingerprint,
                sealed, int(limits.ttl_s * 1000), asked.fingerprint.hex(), size, limits.tenant_answers,
                limits.tenant_bytes, f"{of_tenant}:",
            )  # fmt: skip


def _of(asked: Asked) -> str:
    return f"kelvin:{{{asked.tenant}}}:cache"


def _entry(asked: Asked) -> str:
    return f"{_of(asked)}:{asked.fingerprint.hex()}"
