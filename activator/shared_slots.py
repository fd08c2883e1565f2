"""A replica's slots where several activators give requests to it: they lease them from a store that all of them share.

One question at a time for each version, in a task of its own, and none by who finds a slot. What comes of it is told to
the keeper of the lines. With nobody else there is nothing to share; while the store is away each has its share.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from activator.asking import Asking, Scripts, each
from activator.keys import VersionKey
from activator.line import Line, Replica
from activator.policy.places import GOOD_S, LEASED_S, QUIET_S, RENEW_S, share
from activator.policy.slot_parts import TURN_S, SlotLease, Wish
from activator.shared_rates import Away
from activator.slot_script import LEASE
from activator.subsets import Subset


class Store(Scripts, Protocol):
    """Runs scripts, and knows who else does."""

    @property
    def members(self) -> int:
        """Activators that use it, as far as is known; 1 or more."""
        ...

    @property
    def name(self) -> str:
        """This activator's, of which there is no other."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, as far as is known, in order."""
        ...


@dataclass(slots=True)
class _Kept:
    """A version that has replicas."""

    line: Line
    leases: dict[str, SlotLease] = field(default_factory=dict)  # of replicas
    subset: Subset = field(default_factory=Subset)
    asked_s: float = -inf
    quiet_until_s: float = -inf  # there was less than was wanted
    ends_s: float = -inf
    is_alone: bool = False  # since the store was away for too long
    is_wide: bool = False  # who waits finds none at those that we prefer
    answer: "asyncio.Future[None] | None" = None  # for who waits for the next one

    def heard(self) -> None:
        """It came."""
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.set_result(None)


class SharedSlots:
    """Of all versions. `clock` is monotonic seconds; the store keeps for `leased_s` what it hears no more of."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        leased_s: float = LEASED_S,
        turn_s: float = TURN_S,
        subsets: bool = True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._leased_s = leased_s
        self._turn_s = turn_s
        self._subsets = subsets
        self._kept: dict[VersionKey, _Kept] = {}
        self._asking: Asking[VersionKey] = Asking()
        self._is_on = store.members > 1
        self._lines: Mapping[VersionKey, Line] = {}
        self._grant: Callable[[VersionKey], None] = lambda key: None

    def __repr__(self) -> str:
        return f"<SharedSlots {'on' if self._is_on else 'off'} versions={len(self._kept)} {self._asking!r}>"

    @property
    def replicas(self) -> dict[bool, int]:
        """Whose slots are leased, by whether we prefer them."""
        every = [replica.is_preferred for kept in self._kept.values() for replica in kept.line.replicas.values()]
        return {True: sum(every), False: len(every) - sum(every)}

    @property
    def is_asking(self) -> bool:
        """Whether an answer is on its way."""
        return len(self._asking) > 0

    def attach(self, lines: Mapping[VersionKey, Line], grant: Callable[[VersionKey], None]) -> None:
        """Whose slots they are, and who is told that a version may have some free."""
        self._lines, self._grant = lines, grant

    def see(self, key: VersionKey, line: Line) -> None:
        """A replica may be new there. Returns at once; it has no slots before the store was asked."""
        if not self._is_on:
            return
        kept = self._kept.get(key)
        if kept is None or kept.line is not line:
            kept = self._kept[key] = _Kept(line)
        for name, replica in line.replicas.items():
            if replica.lease is None or kept.leases.get(name) is not replica.lease:
                kept.leases[name] = replica.lease = SlotLease()

    def lacks(self, key: VersionKey, line: Line) -> None:
        """Somebody waits there. Returns at once."""
        self.see(key, line)
        kept = self._kept.get(key)
        if kept is not None and self._clock() >= kept.quiet_until_s and _may_have_more(line):
            self._try_ask(key, kept)

    async def fetch(self, key: VersionKey, line: Line, replica: Replica) -> None:
        """A request belongs there, of which no slot is free here: wait for one to be leased, where there may be some,
        and no longer than the store takes for two answers. Cancelling it leaves nothing behind.
        """
        self.see(key, line)
        kept, lease = self._kept.get(key), replica.lease
        if kept is None or lease is None or not _may_grow(replica, self._clock()):
            return
        lease.called += 1
        try:
            for _ in range(2):  # what is being asked already knows nothing of it
                if self._kept.get(key) is not kept or not _may_grow(replica, self._clock()):
                    return
                self._try_ask(key, kept)
                if (task := self._asking.of(key)) is None:
                    return
                kept.answer = kept.answer or asyncio.get_running_loop().create_future()
                await asyncio.wait((task, kept.answer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lease.called -= 1

    async def run(self) -> None:
        """Until cancelled."""
        await each(QUIET_S, self.tend)

    async def tend(self) -> None:
        """Once: ask for those who wait, renew what is used, give back what is not."""
        if self._is_on != (self._store.members > 1):
            self._turn(is_on=not self._is_on)
        now_s = self._clock()
        for key, kept in list(self._kept.items()):
            if self._lines.get(key) is not kept.line:
                del self._kept[key]
            elif not self._store.is_up:
                self._go_alone(key, kept, is_over=now_s >= kept.ends_s)
            elif now_s - kept.asked_s >= RENEW_S or _is_due(kept, now_s):
                self._try_ask(key, kept)

    async def close(self) -> None:
        """Give all back, as far as that is quick, and wait for what is being asked, which ends by itself."""
        await self._asking.close(self._give_back())
        self._kept.clear()

    def _turn(self, *, is_on: bool) -> None:
        """Others have come, or gone."""
        self._is_on = is_on
        self._kept.clear()
        for key, line in list(self._lines.items()):
            if is_on:
                self.lacks(key, line)
                continue
            for replica in line.replicas.values():
                replica.lease, replica.is_preferred = None, True
            self._grant(key)

    def _go_alone(self, key: VersionKey, kept: _Kept, *, is_over: bool) -> None:
        """Nobody can be asked: a share of each replica of which nothing is leased, or not any more."""
        self.see(key, kept.line)
        kept.is_alone = True
        for replica in kept.line.replicas.values():
            if replica.lease is not None and (is_over or not replica.lease.held):
                replica.lease.slots = share(replica.row.max_streams, self._store.members)
        self._grant(key)

    def _try_ask(self, key: VersionKey, kept: _Kept, *, is_last: bool = False) -> None:
        """Unless it is being asked, or there is nothing to say."""
        if key in self._asking or not self._store.is_up:
            return
        self.see(key, kept.line)
        replicas = kept.line.replicas
        for name in kept.leases.keys() - replicas.keys():
            del kept.leases[name]
        is_idle = all(lease.is_idle(replicas[name].running) for name, lease in kept.leases.items())
        if len(kept.line.waiting) or not is_idle:
            self._asking.start(key, self._ask(key, kept, is_last))

    async def _ask(self, key: VersionKey, kept: _Kept, is_last: bool) -> None:
        """Again at once where what came meanwhile lacks slots that there may be."""
        hash_name = f"kelvin:{{{key.tenant}/{key.version}}}:slots"
        while rows := self._wishes(kept, is_last):
            words: list[str | int] = []
            for name, slots, wish in rows:
                words += [name, slots, wish.keep, wish.need, wish.want - wish.need]
            try:
                told: list[int] = await self._store.ask(
                    LEASE, (hash_name,), self._store.name, str(self._leased_s), str(self._turn_s), *words
                )
            except Away:
                return  # what was leased is good until its time is over
            kept.ends_s = kept.asked_s + GOOD_S
            for (name, _, wish), slots in zip(rows, told, strict=True):
                quiet_s = self._clock() + QUIET_S if slots < wish.want else -inf
                if (lease := kept.leases.get(name)) is not None:
                    lease.told(wish, slots)
                    lease.short_until_s = max(lease.short_until_s, quiet_s)
                if lease is None or not lease.called:  # else others may have some for those who wait
                    kept.quiet_until_s = max(kept.quiet_until_s, quiet_s)
            kept.heard()
            if self._kept.get(key) is kept:
                self._grant(key)
            if kept.subset.has_others and not kept.is_wide and len(kept.line.waiting) and not kept.line.free:
                kept.quiet_until_s = -inf  # nobody waits while there may be one at a replica that we don't prefer
            if is_last or not _is_due(kept, self._clock()):
                return

    def _wishes(self, kept: _Kept, is_last: bool) -> list[tuple[str, int, Wish]]:
        """Of each replica of which there is something to say its name, its slots, and what to ask."""
        kept.asked_s, line = self._clock(), kept.line
        was_alone, kept.is_alone = kept.is_alone, False
        if was_alone:
            kept.quiet_until_s = kept.asked_s + RENEW_S
        if self._subsets:
            kept.subset.choose(line, self._store.names, self._store.name, kept.asked_s)
        may_prefer = any(each.is_preferred and _may_grow(each, kept.asked_s) for each in line.replicas.values())
        kept.is_wide = was_alone or (len(line.waiting) > 0 and (kept.is_wide or not may_prefer))
        at = {name for name, each in line.replicas.items() if kept.is_wide or each.is_preferred}
        all_waiting = -(-len(line.waiting) // max(1, len(at)))
        rows: list[tuple[str, int, Wish]] = []
        for name, lease in kept.leases.items():
            replica = line.replicas.get(name)
            if replica is None:
                continue
            slots, inside, waiting = replica.row.max_streams, replica.running, all_waiting if name in at else 0
            leaves = is_last or replica.is_closed
            if lease.is_idle(inside) and (leaves or not waiting):
                continue
            if leaves:
                wish = lease.leave(inside)
            elif was_alone:
                wish, lease.short_until_s = lease.stay(inside), kept.quiet_until_s
            else:
                wish = lease.ask(inside, waiting, slots)
            rows.append((name, slots, wish))
        return rows

    async def _give_back(self) -> None:
        for key, kept in list(self._kept.items()):
            if (task := self._asking.of(key)) is not None:
                await asyncio.wait((task,))
            self._try_ask(key, kept, is_last=True)
            if (task := self._asking.of(key)) is not None:
                await asyncio.wait((task,))


def _is_due(kept: _Kept, now_s: float) -> bool:
    """Whether somebody waits who finds none, or others may have some of ours."""
    line = kept.line
    if any(lease.called and _may_grow(line.replicas[name], now_s) for name, lease in _here(kept)):
        return True
    if now_s < kept.quiet_until_s:
        return False
    if len(line.waiting) and not line.free and _may_have_more(line):
        return True
    return any(lease.gives_back(line.replicas[name].running) for name, lease in _here(kept))


def _here(kept: _Kept) -> list[tuple[str, SlotLease]]:
    """Leases of replicas that have not gone meanwhile."""
    return [(name, lease) for name, lease in kept.leases.items() if name in kept.line.replicas]


def _may_grow(replica: Replica, now_s: float) -> bool:
    """Whether it has no free slot here, and may have one that is not ours."""
    lease = replica.lease
    return (
        lease is not None
        and not replica.free
        and not replica.is_closed
        and replica.slots < replica.row.max_streams
        and now_s >= lease.short_until_s
    )


def _may_have_more(line: Line) -> bool:
    """Whether there is a slot that is not ours."""
    return any(replica.slots < replica.row.max_streams and not replica.is_closed for replica in line.replicas.values())
