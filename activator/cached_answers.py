"""Where cached answers lie: the interface, and this process's own memory."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from activator.policy.once import Asked, Kept, OnceLimits, Shelf


class Found(NamedTuple):
    """An answer, sealed, and for how many seconds it has been kept."""

    sealed: bytes
    age_s: float


class CachedAnswers(Protocol):
    """Bounded in time and in what it takes. The same request of another tenant is another one."""

    @property
    def nbytes(self) -> int:
        """Of what is kept in this process."""
        ...

    async def find(self, asked: Asked) -> Found | None:
        """What can't be found out soon is as if it were not kept. Safe to cancel."""
        ...

    def put(self, asked: Asked, sealed: bytes) -> None:
        """Keep it soon, in the place of what was; not what is too large, nor what can't be kept now."""
        ...

    def tidy(self) -> None:
        """Forget what has ended, as far as that does not end by itself."""
        ...


class OwnCached:
    """In this process, for one activator. Used on one event loop. `clock` is monotonic seconds."""

    def __init__(self, limits: OnceLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._shelf = Shelf(limits)
        self._clock = clock

    def __repr__(self) -> str:
        return f"<OwnCached {self._shelf!r}>"

    @property
    def nbytes(self) -> int:
        """See `CachedAnswers`."""
        return self._shelf.nbytes

    async def find(self, asked: Asked) -> Found | None:
        """At once."""
        now_s = self._clock()
        kept = self._shelf.find(asked.tenant, asked.fingerprint, now_s)
        return None if kept is None else Found(kept.sealed, self._shelf.age_s(asked.tenant, asked.fingerprint, now_s))

    def put(self, asked: Asked, sealed: bytes) -> None:
        """At once."""
        self._shelf.put(asked.tenant, asked.fingerprint, Kept(asked.fingerprint, sealed), self._clock())

    def tidy(self) -> None:
        """See `CachedAnswers`."""
        self._shelf.tidy(self._clock())
