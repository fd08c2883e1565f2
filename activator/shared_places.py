"""`shares.Entrance` over a store that several activators share: places are leased from it, so few requests ask it.

It is asked once for all of a tenant who wait, in a task of its own. While the store is away nobody waits for it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from activator.asking import Asking, each
from activator.policy.places import RENEW_S, Leased, share
from activator.shared_rates import Away
from activator.shares import RETRY_AFTER_S, Place
from contracts.errors import Refused
from contracts.traffic_errors import TenantBusy


class PlaceStore(Protocol):
    """Places that several activators lease."""

    @property
    def is_up(self) -> bool:
        """Whether it answered last."""
        ...

    @property
    def members(self) -> int:
        """Activators that use it, as far as is known; 1 or more."""
        ...

    async def lease(self, key: str, inside: int, want: int, limit: int) -> int:
        """Have as many of `want` places as others leave of `limit`, and no fewer than are `inside`. Raises Away, within
        a fraction of a second.
        """
        ...


class SharedPlaces:
    """Of all tenants. `clock` is monotonic seconds."""

    def __init__(self, store: PlaceStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._inside: Counter[str] = Counter()
        self._leased: dict[str, Leased] = {}
        self._limits: dict[str, int] = {}  # as they were last asked with
        self._asking: Asking[str] = Asking()

    def __repr__(self) -> str:
        return f"<SharedPlaces tenants={len(self._leased)} inside={self._inside.total()} {self._store!r}>"

    async def enter(self, tenant: str, limit: int | None) -> Place:
        """See `shares.Entrance`. Waits for the store at most as long as it may take to answer, not while it is away."""
        if limit is None:
            return Place(self._inside, tenant, None)
        leased = self._leased.setdefault(tenant, Leased())
        self._limits[tenant] = limit
        while True:
            now_s, inside = self._clock(), self._inside[tenant]
            if inside >= limit:
                raise Refused(TenantBusy(limit, RETRY_AFTER_S))
            if leased.has_place(inside, now_s) or self._has_share(leased, inside, limit, now_s):
                leased.used(inside + 1)
                return Place(self._inside, tenant, None)
            asking = self._asking.of(tenant)
            if asking is None:
                if not self._store.is_up or now_s < leased.quiet_until_s:
                    raise Refused(TenantBusy(limit, RETRY_AFTER_S))
                asking = self._ask(tenant, leased.want(inside, self._asking.waiting[tenant] + 1, limit))
            await self._asking.wait(tenant, asking)

    async def run(self) -> None:
        """Renew what is used and give back what is not, until cancelled."""
        await each(RENEW_S, self.tend)

    async def tend(self) -> None:
        """Once; tenants one after another, as nobody waits for it."""
        for tenant, leased in list(self._leased.items()):
            if not self._store.is_up:
                return
            if tenant not in self._asking:
                await asyncio.wait((self._ask(tenant, leased.renewal(self._inside[tenant])),))
            if tenant not in self._asking and not self._asking.waiting[tenant] and leased.is_idle(self._inside[tenant]):
                del self._leased[tenant], self._limits[tenant]

    async def close(self) -> None:
        """Give all back, as far as that is quick, and wait for what is being asked, which ends by itself."""
        await self._asking.close(self._give_back())

    async def _give_back(self) -> None:
        for tenant in list(self._leased):
            await asyncio.wait((self._asking.of(tenant) or self._ask(tenant, 0),))

    def _has_share(self, leased: Leased, inside: int, limit: int, now_s: float) -> bool:
        """Without the store, and without places that are good still."""
        return not self._store.is_up and now_s >= leased.ends_s and inside < share(limit, self._store.members)

    def _ask(self, tenant: str, want: int) -> "asyncio.Task[None]":
        self._leased[tenant].asked(want)
        return self._asking.start(tenant, self._lease(tenant, want))

    async def _lease(self, tenant: str, want: int) -> None:
        sent_s = self._clock()
        try:
            granted = await self._store.lease(
                f"kelvin:{{{tenant}}}:places", self._inside[tenant], want, self._limits[tenant]
            )
            self._leased[tenant].told(want, granted, sent_s, self._clock())
        except Away:
            pass  # what was leased is good until its time is over
