"""Give each request a slot at a replica of its version, in fair order, and assign slots that come free to waiting
requests.

Each step runs on one event loop without an await in between: this is the one writer of every version's slots. Decisions
are made elsewhere: `policy/admission.py` whether a request may wait, `policy/fair.py` whose turn it is, `shedding.py`
who leaves a full queue, `slots.py` which replica a request gets, `roster.py` which replicas serve, `wake.py` when the
decider is told, `policy/expected.py` when a slot is expected.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from activator.breakers import INTEGRITY, LONGEST_S, Breakers, Resting
from activator.keys import VersionKey
from activator.line import Line, Replica, Waiter
from activator.policy.admission import AdmissionFacts, Admit, Hold, QueueLimits, Shed, decide
from activator.policy.ask import Ask, Rank
from activator.policy.crowd import Crowd
from activator.policy.expected import Outlook, Pace, Starts, comes_too_late, for_caller, wait_s
from activator.policy.fair import FairQueue, Place, cost
from activator.policy.held_quota import RENEW_S
from activator.policy.shed import Reason, ends_in_s
from activator.policy.slot_shares import SlotShares
from activator.policy.traffic import Standing
from activator.roster import Roster, key_of
from activator.shedding import Shedding
from activator.slots import NoSlotInTime, Slot, take_other, take_slot
from activator.wake import Waker
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.errors import Failure, Refused
from contracts.traffic_errors import DeadlineExceeded, DeadlineTooShort


@dataclass(frozen=True, slots=True)
class Peers:
    """The activators that share the replicas, by their names."""

    me: str = ""
    names: Callable[[], tuple[str, ...]] = tuple  # of all, this one included, in order; () where nobody knows
    prefer: bool = True  # whether each prefers some of the replicas


class Throttler:
    """Slots of all versions. `clock` returns monotonic seconds."""

    def __init__(
        self,
        limits: QueueLimits,
        waker: Waker,
        *,
        longest_rest_s: float = LONGEST_S,
        peers: Peers = Peers(),
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = random.randrange,
    ) -> None:
        self._limits = limits
        self._waker = waker
        self._peers = peers
        self._clock = clock
        self._draw = draw
        self._lines: dict[VersionKey, Line] = {}
        self._starts = Starts()
        self.resting = Resting(longest_rest_s, clock, self._reopen)
        self.breakers = Breakers(longest_rest_s)
        self.shedding = Shedding(limits)
        self._everyone: Crowd[Place[Waiter]] = Crowd(limits.in_all)
        self.loads = self._everyone.loads
        self.refusals = 0  # requests that full replicas refused
        self._roster = Roster(self._lines, self, self._starts, self.breakers, waker, clock)

    def __repr__(self) -> str:
        running = sum(replica.running for line in self._lines.values() for replica in line.replicas.values())
        return f"<Throttler versions={len(self._lines)} running={running} queued={self.loads.in_all.entries}>"

    def slot(self, key: VersionKey, ask: Ask, deadline: Deadline, again_by_s: float | None = None) -> Slot:
        """Return a block that holds a slot of some replica.

        Entering waits for it. Raises Refused: Overloaded, DeadlineExceeded, or why the start failed. Raises
        NoSlotInTime if no slot came until `again_by_s` (monotonic), unless the request waits for a start. Cancelling a
        wait leaves nothing behind.
        """
        return Slot(self, key, ask, deadline, self._clock(), again_by_s)

    def try_other(self, key: VersionKey, ask: Ask, deadline: Deadline, than: Replica) -> Slot | None:
        """Return a slot of another replica than `than` if one is free now, else None. The replica has no failures. The
        caller must end the slot.
        """
        line = self._lines.get(key)
        if line is None:
            return None
        self._count_request(key, line, ask)
        if not line.may_take(ask.tenant, ask.weight) or (other := take_other(line, than, ask.tenant)) is None:
            return None
        now = self._clock()
        line.pace.took(now)
        _send(line, other, now)
        return Slot(self, key, ask, deadline, now, held=other)

    def has_several(self, key: VersionKey) -> bool:
        """Whether the version has more than one replica."""
        line = self._lines.get(key)
        return line is not None and len(line.replicas) > 1

    def is_asleep(self, key: VersionKey) -> bool:
        """Whether no replica of the version takes requests."""
        line = self._lines.get(key)
        return line is None or line.is_asleep

    def standing(self, key: VersionKey) -> Standing:
        """Return whether the version sleeps, has a free slot, or is full. Slots of other activators are not counted."""
        line = self._lines.get(key)
        if line is None or line.is_asleep:
            return Standing.ASLEEP
        has_room = any(each.is_open and each.running < each.row.max_streams for each in line.replicas.values())
        return Standing.ROOM if has_room and not len(line.waiting) else Standing.FULL

    def is_wanted(self, key: VersionKey) -> bool:
        """Whether requests wait for a first replica."""
        line = self._lines.get(key)
        return line is not None and len(line.waiting) > 0 and line.is_asleep

    def outlook(self, key: VersionKey, ask: Ask, deadline: Deadline) -> Outlook:
        """Return what a request that waits for a slot is told."""
        line = self._lines.get(key)
        if line is None or line.is_asleep:
            return self._starts.outlook(key, self._clock())
        return Outlook(wait_s(line.waiting.tokens_before(ask, deadline.at_s), line.pace.tokens_per_s(line.slots)))

    def wait_of(self, key: VersionKey, tenant: str, rank: Rank) -> tuple[float | None, bool]:
        """Return `(seconds or None, is_cold)`: how long a new request of the tenant would wait, and whether for a
        start.

        None means unknown. So is the wait for a start of a version that failed since its last answer: some request has
        to find out whether starts still fail.
        """
        line = self._lines.get(key)
        if line is None or line.is_asleep:
            return None if key in self.breakers else self._starts.outlook(key, self._clock()).remaining_s, True
        tokens = line.waiting.tokens_of(tenant, rank) if len(line.waiting) else 0
        return wait_s(tokens, line.pace.tokens_per_s(line.slots)), False

    def want(self, key: VersionKey, for_s: float) -> None:
        """Have a version at zero started although no request waits: tell the decider for `for_s` seconds."""
        if self.is_asleep(key):
            self._waker.nudge(key, for_s)

    def queued(self, key: VersionKey) -> int:
        """Requests that wait for the version."""
        line = self._lines.get(key)
        return 0 if line is None else len(line.waiting)

    def pace(self, key: VersionKey) -> Pace | None:
        """How fast its slots come free, while there is anything of it."""
        line = self._lines.get(key)
        return None if line is None else line.pace

    def addresses(self) -> set[str]:
        """The sockets of all replicas."""
        return {replica.row.address for line in self._lines.values() for replica in line.replicas.values()}

    def apply(self, feed: Feed) -> None:
        """Take the replicas and failures of a line of the feed over; waiters are woken before this returns."""
        self._roster.apply(feed)

    def report_failed(self, replica: Replica, code: str | None = None) -> None:
        """Record that a request at this replica failed. The replica gets no requests for a moment; the feed says
        whether it is gone.

        A code of a version's fault counts against the version too: after several in a row no request waits for a start.
        """
        opened = self.resting.failed(replica)
        if code is not None and (opened or code in INTEGRITY):
            self.breakers.failed(replica.row.tenant, replica.row.version, code, self._clock())
        if opened and (line := self._lines.get(key := key_of(replica.row))) is not None:
            self.grant(key, line)  # shares of fewer slots are other ones
            if self.is_wanted(key):
                self._waker.ensure(key)

    def report_ended(self, replica: Replica) -> None:
        """Forget a replica whose process has ended, before the feed says so. If it was the last one, requests wait for
        a start.
        """
        self._roster.remove(replica.row.runtime_id)

    def report_began(self, replica: Replica, credit: int | None) -> None:
        """Record that the replica began an answer, so it takes requests, and the credit that it told with it."""
        if replica.breaker is not None:
            self.resting.answered(replica)
        now = self._clock()
        replica.credit.taken(credit, now)
        if replica.most is not None or (credit is not None and credit < replica.row.max_streams):
            self._review(replica, replica.running, now)
            line = self._lines.get(key := key_of(replica.row))
            if line is not None and len(line.waiting):
                self.grant(key, line)

    def report_full(self, replica: Replica, credit: int) -> None:
        """Record that the replica refused a request, whose slot is not given back yet, because it is full."""
        self.refusals += 1
        now = self._clock()
        replica.credit.refused(credit, now)
        self._review(replica, replica.running - 1, now)

    def report_answered(self, replica: Replica) -> None:
        """Record that the replica answered. That clears its version too, because a faulty one fails before its first
        token.
        """
        if self.breakers:
            self.breakers.forget(key_of(replica.row))

    async def acquire(self, key: VersionKey, ask: Ask, deadline: Deadline, again_by_s: float | None = None) -> Replica:
        """Wait for a slot, and return its replica. Raises as entering `slot`. The caller must call `release` once."""
        now = self._clock()
        if self.breakers and self.is_asleep(key):
            self.breakers.check(key, now, self._why(key, ask))
        line = self.line_of(key)
        if now >= line.review_s:
            if line.waiting:
                self.grant(key, line)  # a slot that is free now is theirs
            else:
                self._review_all(line, now)
        if line.waiting:
            self._count_request(key, line, ask)
        else:
            if now >= line.shares.ends_s:
                line.shares.refresh(now, 0)
            line.shares.ask(ask.tenant, ask.weight, 0)
        # Nobody waits who may have a free slot: where this tenant may, it has nobody before it.
        is_free = line.may_take(ask.tenant, ask.weight)
        facts = AdmissionFacts(is_free, ask, line.waiting.own, self.loads, self._limits, deadline)
        match decide(facts, now):
            case Admit():
                line.waiting.pass_by(ask)
                line.pace.took(now)
                return self._take_slot(line, ask, now)
            case Shed(failure):
                self.tidy(key, line)
                raise Refused(failure)
            case Hold(until_s, full):
                self._check_time(key, line, ask, until_s, now)
                waiter = _waiter(now, until_s)
                if full is None:
                    line.waiting.put(waiter, ask, until_s)
                elif not self.shedding.try_enter(line, waiter, ask):
                    self.tidy(key, line)
                    raise Refused(full)
                return await self._wait(key, line, ask, waiter, again_by_s)

    async def take_again(
        self, key: VersionKey, replica: Replica, ask: Ask, deadline: Deadline, came_s: float, again_by_s: float | None
    ) -> Replica:
        """Give a slot back whose replica refused the request, and wait for another one. Raises as `acquire`.

        The request came at `came_s`. It returns to its former place in the queue, also if the queue is full by now.
        """
        line, until_s = self.line_of(key), min(deadline.at_s, came_s + self._limits.wait_s)
        waiter = _waiter(came_s, until_s)
        line.waiting.put_first(waiter, ask, until_s)
        self.give_back(key, replica, ask, 0)
        return await self._wait(key, line, ask, waiter, again_by_s)

    def release(self, key: VersionKey, replica: Replica, ask: Ask, tokens: int | None) -> None:
        """Give back the slot of `ask`, which took `tokens` (None: as estimated). The next waiting request has it on
        return.
        """
        line = self._lines.get(key)
        if line is not None and tokens is not None:
            line.waiting.settle(ask, tokens)
        self.give_back(key, replica, ask, cost(ask.tokens) if tokens is None else tokens)

    def give_back(self, key: VersionKey, replica: Replica, ask: Ask, took: int) -> None:
        """Give back the slot without settling in the queue: that is done already, or another slot of the request does
        it.
        """
        assert replica.running > 0
        replica.running -= 1
        is_owner = ask.tenant == key.tenant
        replica.owner_running -= is_owner
        if replica.breaker is not None:
            replica.breaker.leave(ask)
        line = self._lines.get(key)
        if line is not None:
            if not replica.gone:
                line.shares.owner_running -= is_owner
                line.pace.came_back(self._clock(), cost(ask.tokens), took)
            if len(line.waiting) or not line.replicas:
                self.grant(key, line)

    def _count_request(self, key: VersionKey, line: Line, ask: Ask) -> None:
        """Count a new request in the slot shares, and give out the slots that this frees for others."""
        if self._clock() >= line.shares.ends_s:
            self.grant(key, line)  # begins the next window first: it would forget the request
        if line.shares.ask(ask.tenant, ask.weight, line.waiting.waiting_of(ask.tenant)):
            self.grant(key, line)

    def check_integrity(self) -> None:
        """No line has both a free slot and a waiter who may have it; loads add up; every replica is where it is said to
        be.
        """
        total = 0
        for key, line in self._lines.items():
            line.waiting.check_integrity()
            total += len(line.waiting)
            line.shares.check_integrity()
            for tenant in line.waiting.tenants():
                weight = line.waiting.weight_of(tenant)
                assert not line.may_take(tenant, weight), f"{key} has a free slot, and {tenant} waits for it"
            running = sum(replica.running for replica in line.replicas.values())
            assert line.pace.running == running
            assert line.shares.owner_running == sum(each.owner_running for each in line.replicas.values())
            assert all(replica.running >= 0 for replica in line.replicas.values())
        assert total == self.loads.in_all.entries
        self._roster.check_integrity()

    def _check_time(self, key: VersionKey, line: Line, ask: Ask, until_s: float, now: float) -> None:
        """Raise Refused(DeadlineTooShort) if no slot is expected in time. A version at zero is woken all the same: else
        one whose callers have little time would sleep for ever.
        """
        left_s = until_s - now
        if asleep := line.is_asleep:
            expected_s = self._starts.outlook(key, now).remaining_s
        else:
            expected_s = ends_in_s(line.waiting.tokens_before(ask, until_s), ask, line.pace, line.slots)
        if expected_s is None or not comes_too_late(expected_s, left_s):
            return
        if asleep:
            self._waker.nudge(key, expected_s)
        self.tidy(key, line)
        self.shedding.refused(Reason.LATE, ask)
        raise Refused(DeadlineTooShort(expected_s, left_s, asleep))

    async def _wait(self, key: VersionKey, line: Line, ask: Ask, waiter: Waiter, again_by_s: float | None) -> Replica:
        """Wait for the slot of a request that is in the queue. Whatever fails here takes it out."""
        try:
            self._grant_later(key, line)
            if line.is_asleep:
                self.breakers.enter(key, waiter, waiter.came_s)
                self._waker.ensure(key)
            async with asyncio.timeout(max(0.0, waiter.until_s - self._clock())):
                if again_by_s is not None:
                    await asyncio.wait((waiter.granted,), timeout=max(0.0, again_by_s - self._clock()))
                    if not (waiter.granted.done() or line.awaits_start):
                        raise NoSlotInTime
                granted = await waiter.granted
                if isinstance(granted, Failure):
                    raise Refused(granted)
                return granted
        except BaseException as error:
            self._leave(key, line, waiter, ask)
            if isinstance(error, TimeoutError):
                stage, why = (
                    ("waiting for a replica to start", self._why(key, ask)) if line.is_asleep else ("queued", "")
                )
                raise Refused(DeadlineExceeded(self._clock() - waiter.came_s, stage, why)) from None
            raise
        finally:
            self.breakers.leave(key, waiter)

    def _why(self, key: VersionKey, ask: Ask) -> str:
        """Return why the version does not start, "" where that is unknown."""
        problem = self._starts.problem(key)
        return "" if problem is None else for_caller(problem, ask.tenant == key.tenant).message

    def _leave(self, key: VersionKey, line: Line, waiter: Waiter, ask: Ask) -> None:
        """Remove a waiting request that ends without its slot: from the queue, or by giving back the slot that it just
        got.
        """
        granted = waiter.granted
        if line.waiting.discard(waiter):
            granted.cancel()
        elif granted.done() and not granted.cancelled() and isinstance(given := granted.result(), Replica):
            self.release(key, given, ask, 0)
        if not self.is_wanted(key):
            self._waker.rest(key)
        self.tidy(key, line)

    def grant(self, key: VersionKey, line: Line) -> None:
        """Assign free slots to the next waiting requests."""
        now = self._clock()
        if now >= line.review_s:
            self._review_all(line, now)
        line.shares.refresh(now, line.waiting.waiting_of(key.tenant))
        if len(line.waiting):
            self.shedding.sweep(line, now)
        while len(line.waiting) and line.free and (found := self.shedding.next_in_time(line, now)) is not None:
            line.pace.took(now)
            found[0].granted.set_result(self._take_slot(line, found[1], now))
        self._grant_later(key, line)
        self.tidy(key, line)

    def _grant_later(self, key: VersionKey, line: Line) -> None:
        """Grant again when requests that wait may have a slot without any other event: in the next window of the
        shares, where a slot is free that is reserved for the owner, and when a replica may have more from here.
        """
        if not len(line.waiting):
            return
        now = self._clock()
        due_s = now + line.shares.refresh_in_s(now) if line.free else inf
        if any(replica.most is not None and not replica.is_closed for replica in line.replicas.values()):
            due_s = min(due_s, line.review_s)
        if due_s < line.due_s:
            if line.due is not None:
                line.due.cancel()
            line.due_s = due_s
            line.due = asyncio.get_running_loop().call_later(max(0.0, due_s - now), self._grant_due, key, line)

    def _grant_due(self, key: VersionKey, line: Line) -> None:
        line.due_s, line.due = inf, None
        if self._lines.get(key) is line:
            self.grant(key, line)

    def tidy(self, key: VersionKey, line: Line) -> None:
        """Forget the version's queue if it has neither replicas nor waiting requests."""
        if not line.replicas and not len(line.waiting) and self._lines.get(key) is line:
            del self._lines[key]  # whoever leaves late may hold an older line of the same version

    def line_of(self, key: VersionKey) -> Line:
        """Return the version's queue. Creates it if needed."""
        line = self._lines.get(key)
        if line is None:
            queue: FairQueue[Waiter] = FairQueue(self._everyone, self._limits.per_version)
            line = self._lines[key] = Line(queue, SlotShares(key.tenant))
        return line

    def _take_slot(self, line: Line, ask: Ask, now: float) -> Replica:
        replica = take_slot(line, ask, self._draw)
        _send(line, replica, now)
        if replica.breaker is not None:
            replica.breaker.enter(ask, now)
        return replica

    def preferences(self) -> dict[bool, int]:
        """Return the number of replicas that this activator prefers, and of the others; {} without other activators."""
        if self._members < 2:
            return {}
        every = [replica.is_preferred for line in self._lines.values() for replica in line.replicas.values()]
        return {True: sum(every), False: len(every) - sum(every)}

    @property
    def _members(self) -> int:
        return max(1, len(self._peers.names()))

    def _review(self, replica: Replica, running: int, now: float) -> None:
        """Decide how many requests the replica may have, because it told a credit."""
        again_s = replica.review(self._members, running, now)
        if (line := self._lines.get(key_of(replica.row))) is not None:
            line.review_s = min(line.review_s, again_s)

    def _review_all(self, line: Line, now: float) -> None:
        """Decide how many requests each replica may have, and which of them are preferred."""
        members = self._members
        line.review_s = now + RENEW_S
        for replica in line.replicas.values():
            line.review_s = min(line.review_s, replica.review(members, replica.running, now))
        if not self._peers.prefer:
            return
        slots = {name: each.row.max_streams for name, each in line.replicas.items() if not each.row.draining}
        near = line.subset.choose(self._peers.names(), slots, self._peers.me, line.pace.running, now)
        if near is not None:
            for name, replica in line.replicas.items():
                replica.is_preferred = name in near

    def _reopen(self, replica: Replica) -> None:
        key = key_of(replica.row)
        line = self._lines.get(key)
        if line is not None:
            self.grant(key, line)
            if not line.is_asleep:
                self._waker.rest(key)


def _send(line: Line, replica: Replica, now: float) -> None:
    """Record that a request goes to the replica, and how many it is told that this activator wants there."""
    replica.credit.sent(now)
    replica.wants = replica.running + -(-len(line.waiting) // len(line.replicas))


def _waiter(came_s: float, until_s: float) -> Waiter:
    return Waiter(asyncio.get_running_loop().create_future(), came_s, until_s)
