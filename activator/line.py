"""One version's replicas as the door sees them, and who waits for a slot of them.

Written by the parts of the throttler on one event loop: `slots.py`, `roster.py`, `shedding.py`, `breakers.py`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from activator.policy.affinity import Ring
from activator.policy.ask import Ask
from activator.policy.breaker import Breaker
from activator.policy.credit import Credit
from activator.policy.expected import Pace
from activator.policy.fair import FairQueue
from activator.policy.slot_shares import SlotShares
from activator.policy.subsets import Subset
from contracts.control import ReplicaRow
from contracts.errors import Failure


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as the door sees it. Monotonic: `appeared_us`: its row came; `poked_us`: it was asked for."""

    row: ReplicaRow
    appeared_us: int
    poked_us: int | None
    running: int = 0
    owner_running: int = 0  # of these, requests of the version's owner
    breaker: Breaker | None = None  # since a request failed there, until an answer begins
    credit: Credit = field(default_factory=Credit)
    part: int | None = None  # streams of the replica that are for this activator; None: all
    most: int | None = None  # requests that this activator may have there now; None: all that the replica takes
    wants: int = 1  # requests that this activator would have there; the replica is told with the next one
    is_preferred: bool = True  # see `policy/subsets.py`
    gone: bool = False

    @property
    def slots(self) -> int:
        """Streams that are for this activator, also while the replica is full and is asked one request at a time."""
        return self.row.max_streams if self.part is None else self.part

    @property
    def free(self) -> int:
        """How many more requests this activator may send it now."""
        row = self.row
        free = (row.max_streams if self.most is None else self.most) - self.running
        if free < 0 or self.gone or row.draining:
            return 0
        return free if self.breaker is None else min(free, 1) if self.is_open else 0

    def review(self, members: int, running: int, now_s: float) -> float:
        """Decide `part` and `most` by the replica's credit. This activator is one of `members` and has `running`
        requests there. Return when to decide again.
        """
        streams = self.row.max_streams
        part, limit = self.credit.part(streams, members, now_s), self.credit.limit(streams, members, running, now_s)
        self.part, self.most = (part, limit) if min(part, limit) < streams else (None, None)
        return self.credit.changes_s(now_s)

    @property
    def is_open(self) -> bool:
        """Whether it takes a request, but for those that it has."""
        return not (self.is_closed or (self.breaker is not None and self.breaker.is_trying))

    @property
    def is_closed(self) -> bool:
        """Whether it takes no new requests, busy or not."""
        return self.gone or self.row.draining or (self.breaker is not None and self.breaker.is_open)


@dataclass(slots=True, eq=False)
class Waiter:
    # A failure is a result, too: as an exception it would hold the frames that wait for it, and they it.
    granted: "asyncio.Future[Replica | Failure]"
    came_s: float
    until_s: float  # it waits no longer


@dataclass(slots=True)
class Line:
    """One version: its replicas and who waits for them."""

    waiting: FairQueue[Waiter]
    shares: SlotShares  # slots that are reserved for its owner
    replicas: dict[str, Replica] = field(default_factory=dict)
    ring: Ring = field(default_factory=Ring)  # of all of them
    pace: Pace = field(default_factory=Pace)
    due_s: float = inf  # for when a grant is scheduled: a window of `shares` begins, a credit changes
    due: asyncio.TimerHandle | None = None
    swept_s: float = 0.0  # when it was last looked for those who are late
    subset: Subset = field(default_factory=Subset)
    review_s: float = -inf  # when to look again how many requests each replica may have

    @property
    def free(self) -> int:
        free = 0  # plain loops: each request comes by here some times
        for replica in self.replicas.values():
            free += replica.free
        return free

    @property
    def slots(self) -> int:
        """Of replicas that take requests, taken or free."""
        return sum(0 if replica.is_closed else replica.slots for replica in self.replicas.values())

    @property
    def is_asleep(self) -> bool:
        for replica in self.replicas.values():  # noqa: SIM110
            if not replica.is_closed:
                return False
        return True

    @property
    def awaits_start(self) -> bool:
        """Whether none of its replicas will take a request again, rested or not."""
        return all(replica.gone or replica.row.draining for replica in self.replicas.values())

    def may_take(self, tenant: str, weight: int) -> bool:
        """Return whether the tenant may have a free slot."""
        free = self.free
        if tenant == self.shares.owner:
            return free > 0
        return self.shares.may_take(tenant, weight, self.slots, free, self.pace.running)


def next_waiter(line: Line, may_take: Callable[[str], bool] | None = None) -> tuple[Waiter, Ask] | None:
    """Return the next waiter of a tenant that may have a slot, or None.

    Skips cancelled waiters: their futures end at once, but they leave the queue a moment later.
    """
    while (found := line.waiting.take() if may_take is None else line.waiting.take(may_take)) is not None:
        waiter, ask = found
        if not waiter.granted.done():
            return waiter, ask
        line.waiting.settle(ask, 0)
    return None
