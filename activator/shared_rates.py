"""`rates.Counting` over a store that several activators share: blocks of it are used here, so few requests ask it.

A block is asked for once for all who wait for it, in a task of its own. While the store is away nobody waits for it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.asking import Asking, each
from activator.policy.gcra import Standing
from activator.policy.lease import Asked, Lease

TEND_S: Final = 0.5  # between two looks at blocks whose time is over
SWEEP_AT: Final = 1024


class Away(Exception):
    """No answer in time; whether the command was heard, nobody knows."""


class Full(Away):
    """The store answers, and has no room for what was to be kept. The command was not sent."""


class Store(Protocol):
    """Buckets that several activators share."""

    @property
    def is_up(self) -> bool:
        """Whether it answered last."""
        ...

    @property
    def members(self) -> int:
        """Activators that use it, as far as is known; 1 or more."""
        ...

    async def take(self, key: str, limit: int, give: int, need: int, want: int) -> tuple[int, float]:
        """What is granted of what is wanted, nothing where what is needed is not there; and seconds until the bucket is
        full. Raises Away, within a fraction of a second. Not to be repeated.
        """
        ...


class Shared:
    """One kind of limit, of all tenants. `clock` is monotonic seconds."""

    def __init__(self, store: Store, kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._kind = kind
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._limits: dict[str, int] = {}  # as they were last asked with
        self._asking: Asking[str] = Asking()
        self._sweep_at = SWEEP_AT

    def __repr__(self) -> str:
        return f"<Shared {self._kind} tenants={len(self._leases)} asking={len(self._asking)} {self._store!r}>"

    async def hold(self, tenant: str, limit: int, units: int) -> Standing:
        """See `rates.Counting`. Waits for the store at most as long as it may take to answer, and not while it is away.

        Each turn ends with a block that is used, or with none that is to be had, or with a store that is away.
        """
        lease = self._of(tenant, limit)
        while True:
            now_s = self._clock()
            if lease.try_hold(units, now_s):
                return lease.standing(limit, now_s)
            asking = self._asking.of(tenant)
            if asking is None:
                if not self._store.is_up:
                    return lease.hold_alone(self._share(limit), units, now_s)
                if (quiet_s := lease.quiet_s(units, now_s)) is not None:
                    lacks = units - lease.standing(limit, now_s).remaining
                    return lease.standing(limit, now_s, max(quiet_s, lacks * 60 / limit))
                asking = self._start(tenant, lease, limit, units)
            await self._asking.wait(tenant, asking, units)

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """See `rates.Counting`."""
        self._of(tenant, limit).settle(held, used, self._clock())

    def standing(self, tenant: str, limit: int) -> Standing:
        """See `rates.Counting`: as the store said last."""
        return self._of(tenant, limit).standing(limit, self._clock())

    async def run(self) -> None:
        """Give back blocks whose time is over, and tell what is owed, until cancelled."""
        await each(TEND_S, self.tend)

    async def tend(self, ahead_s: float = 0.0) -> None:
        """Once, for blocks that end within so many seconds; tenants one after another, as nobody waits for it."""
        for tenant, lease in list(self._leases.items()):
            if not self._store.is_up:
                return
            limit = self._limits[tenant]
            if tenant in self._asking or (asked := lease.give_back(limit, self._clock(), ahead_s)) is None:
                continue
            await asyncio.wait((self._asking.start(tenant, self._ask(tenant, lease, limit, asked)),))

    async def close(self) -> None:
        """Give all back, as far as that is quick, and wait for what is being asked, which ends by itself."""
        await self._asking.close(self.tend(float("inf")))

    def _start(self, tenant: str, lease: Lease, limit: int, units: int) -> "asyncio.Task[None]":
        asked = lease.ask(limit, units, self._asking.waiting[tenant] + units, self._clock())
        return self._asking.start(tenant, self._ask(tenant, lease, limit, asked))

    async def _ask(self, tenant: str, lease: Lease, limit: int, asked: Asked) -> None:
        try:
            key = f"kelvin:{{{tenant}}}:{self._kind}"
            granted, full_in_s = await self._store.take(key, limit, asked.give, asked.need, asked.want)
        except Away:
            lease.lost(asked)
        except BaseException:
            lease.lost(asked)
            raise
        else:
            lease.told(asked, granted, full_in_s, self._clock())

    def _share(self, limit: int) -> int:
        return max(1, limit // self._store.members)

    def _of(self, tenant: str, limit: int) -> Lease:
        self._limits[tenant] = limit
        found = self._leases.get(tenant)
        if found is None:
            if len(self._leases) >= self._sweep_at:
                self._sweep()
            found = self._leases[tenant] = Lease()
        return found

    def _sweep(self) -> None:
        now_s = self._clock()
        idle = [name for name, each in self._leases.items() if each.is_idle(now_s) and name not in self._asking]
        for name in idle:
            del self._leases[name], self._limits[name]
        self._sweep_at = max(SWEEP_AT, 2 * len(self._leases))
