"""Give each request a slot at a replica of its version: at once, after a wait, or refuse it.

Decisions are made elsewhere: `policy/admission.py` whether a request may wait, `slots.py` who is next and which replica
it gets, `roster.py` which replicas serve, `wake.py` when the decider is told, `policy/expected.py` when a slot is
expected.
"""

import asyncio
import random
import time
from collections.abc import Callable

from activator.breakers import INTEGRITY, LONGEST_S, Breakers, Resting
from activator.keys import VersionKey, key_of
from activator.line import Line, Replica, Waiter
from activator.policy.admission import AdmissionFacts, Admit, Hold, QueueLimits, Shed, decide
from activator.policy.ask import Ask, Rank
from activator.policy.expected import Outlook, Pace, Starts, comes_too_late, for_caller, wait_s
from activator.policy.shed import Reason, ends_in_s
from activator.policy.traffic import Standing
from activator.roster import Roster
from activator.shedding import Shedding
from activator.slots import ALONE, Peers, Slots
from activator.wake import Waker
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.errors import Failure, Refused, Unavailable
from contracts.traffic_errors import DeadlineExceeded, DeadlineTooShort, ReplicaLost


class NoSlotInTime(Exception):
    """No slot came until it had to, and no start is what is waited for."""


class Slot:
    """One request's place at a replica. `tokens`: what it has taken, for its holder to say; None: as estimated."""

    __slots__ = ("_again_by_s", "_ask", "_came_s", "_deadline", "_key", "_replica", "_throttler", "tokens")

    def __init__(
        self,
        throttler: "Throttler",
        key: VersionKey,
        ask: Ask,
        deadline: Deadline,
        came_s: float,
        again_by_s: float | None = None,
        held: Replica | None = None,
    ) -> None:
        self._throttler = throttler
        self._key = key
        self._ask = ask
        self._deadline = deadline
        self._came_s = came_s
        self._again_by_s = again_by_s
        self._replica = held
        self.tokens: int | None = None

    @property
    def replica(self) -> Replica:
        """Whose slot it is, while it is held."""
        assert self._replica is not None
        return self._replica

    async def __aenter__(self) -> "Slot":
        self._replica = await self._throttler.acquire(self._key, self._ask, self._deadline, self._again_by_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def exchange(self) -> None:
        """Give this slot back, because its full replica refused the request, and wait for another one at the request's
        former place in the queue. Raises as entering.
        """
        replica, self._replica, self.tokens = self.replica, None, None
        self._replica = await self._throttler.take_again(
            self._key, replica, self._ask, self._deadline, self._came_s, self._again_by_s
        )

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        replica, self._replica = self._replica, None
        if replica is not None:
            self._throttler.slots.release(self._key, replica, self._ask, self.tokens)

    def outrun(self, told: "asyncio.Task[None] | None") -> None:
        """Give the slot back once `told` is done (None: now), without settling: another slot of the same request
        answers.
        """
        replica, self._replica = self._replica, None
        if replica is None:
            return
        if told is None:
            self._throttler.slots.give_back(self._key, replica, self._ask, 0)
        else:
            told.add_done_callback(lambda _: self._throttler.slots.give_back(self._key, replica, self._ask, 0))


class Throttler:
    """Slots of all versions. `clock` returns monotonic seconds."""

    def __init__(
        self,
        limits: QueueLimits,
        waker: Waker,
        *,
        longest_rest_s: float = LONGEST_S,
        peers: Peers = ALONE,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = random.randrange,
    ) -> None:
        self._limits = limits
        self._waker = waker
        self._clock = clock
        self._starts = Starts()
        self.resting = Resting(longest_rest_s, clock, self._reopen)
        self.breakers = Breakers(longest_rest_s)
        self.shedding = Shedding(limits)
        self.slots = Slots(limits, self.shedding, peers, clock, draw)
        self._lines = self.slots.lines
        self.loads = self.slots.loads
        self.refusals = 0  # requests that full replicas refused
        self._roster = Roster(self.slots, self._starts, self.breakers, waker, clock)

    def __repr__(self) -> str:
        return f"<Throttler {self.slots!r}>"

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
        replica = self.slots.try_take_other(key, ask, than)
        return None if replica is None else Slot(self, key, ask, deadline, self._clock(), held=replica)

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
        if self._clock() >= line.review_s:  # a credit may have ended since the last request
            self.slots.grant(key, line)
        return Standing.ROOM if line.free and not len(line.waiting) else Standing.FULL

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

    def report_failed(self, replica: Replica, code: str = Unavailable.code) -> None:
        """Record that a request at this replica failed. The replica gets no requests for a moment; the feed says
        whether it is gone.

        A code of a version's fault counts against the version too: after several in a row no request waits for a start.
        """
        opened = self.resting.failed(replica, code)
        if code in INTEGRITY or (opened and code == ReplicaLost.code):
            row, retryable = replica.row, code not in INTEGRITY
            self.breakers.failed(row.tenant, row.version, code, self._clock(), retryable=retryable)
        if opened and (line := self._lines.get(key := key_of(replica.row))) is not None:
            self.slots.grant(key, line)  # shares of fewer slots are other ones
            if self.slots.is_wanted(key):
                self._waker.ensure(key)

    def report_ended(self, replica: Replica) -> None:
        """Forget a replica whose process has ended, before the feed says so. If it was the last one, requests wait for
        a start. The feed may have another replica of that name by now.
        """
        if not replica.gone:
            self._roster.remove(replica.row.runtime_id)

    def report_began(self, replica: Replica, credit: int | None) -> None:
        """Record that the replica began an answer, so it takes requests, and the credit that it told with it."""
        if replica.breaker is not None:
            self.resting.answered(replica)
        now = self._clock()
        replica.credit.taken(credit, now)
        if replica.most is not None or (credit is not None and credit < replica.row.max_streams):
            self.slots.review(replica, replica.running, now)
            line = self._lines.get(key := key_of(replica.row))
            if line is not None and len(line.waiting):
                self.slots.grant(key, line)

    def report_full(self, replica: Replica, credit: int) -> None:
        """Record that the replica refused a request, whose slot is not given back yet, because it is full."""
        self.refusals += 1
        now = self._clock()
        replica.credit.refused(credit, now)
        self.slots.review(replica, replica.running - 1, now)

    def report_answered(self, replica: Replica) -> None:
        """Record that the replica answered. That clears its version too, because a faulty one fails before its first
        token.
        """
        if self.breakers:
            self.breakers.forget(key_of(replica.row))

    async def acquire(self, key: VersionKey, ask: Ask, deadline: Deadline, again_by_s: float | None = None) -> Replica:
        """Wait for a slot, and return its replica. Raises as entering `slot`. The caller gives it back by
        `slots.release`.
        """
        now = self._clock()
        if self.breakers and self.is_asleep(key):
            self.breakers.check(key, now, self._why(key, ask))
        line = self.slots.line_of(key)
        if now >= line.review_s:
            if line.waiting:
                self.slots.grant(key, line)  # a slot that is free now is theirs
            else:
                self.slots.review_all(line, now)
        if line.waiting:
            self.slots.count_request(key, line, ask)
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
                return self.slots.take(line, ask, now)
            case Shed(failure):
                self.slots.tidy(key, line)
                raise Refused(failure)
            case Hold(until_s, full):
                self._check_time(key, line, ask, until_s, now)
                waiter = _waiter(now, until_s)
                if full is None:
                    line.waiting.put(waiter, ask, until_s)
                elif not self.shedding.try_enter(line, waiter, ask):
                    self.slots.tidy(key, line)
                    raise Refused(full)
                return await self._wait(key, line, ask, waiter, again_by_s)

    async def take_again(
        self, key: VersionKey, replica: Replica, ask: Ask, deadline: Deadline, came_s: float, again_by_s: float | None
    ) -> Replica:
        """Give a slot back whose replica refused the request, and wait for another one. Raises as `acquire`.

        The request came at `came_s`. It returns to its former place in the queue, also if the queue is full by now.
        """
        line, until_s = self.slots.line_of(key), min(deadline.at_s, came_s + self._limits.wait_s)
        waiter = _waiter(came_s, until_s)
        line.waiting.put_first(waiter, ask, until_s)
        self.slots.give_back(key, replica, ask, 0)
        # The line may be new, so its shares have not counted this request, which waits or has a slot by now.
        line.shares.ask(ask.tenant, ask.weight, line.waiting.waiting_of(ask.tenant) - 1)
        return await self._wait(key, line, ask, waiter, again_by_s)

    def check_integrity(self) -> None:
        """No line has both a free slot and a waiter who may have it; loads add up; every replica is where it is said to
        be.
        """
        self.slots.check_integrity()
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
        self.slots.tidy(key, line)
        self.shedding.refused(Reason.LATE, ask)
        raise Refused(DeadlineTooShort(expected_s, left_s, asleep))

    async def _wait(self, key: VersionKey, line: Line, ask: Ask, waiter: Waiter, again_by_s: float | None) -> Replica:
        """Wait for the slot of a request that is in the queue. Whatever fails here takes it out."""
        try:
            self.slots.grant_later(key, line)
            if line.is_asleep:
                self.breakers.enter(key, waiter, self._clock())
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
            self.slots.release(key, given, ask, 0)
        if not self.slots.is_wanted(key):
            self._waker.rest(key)
        self.slots.tidy(key, line)

    def _reopen(self, replica: Replica) -> None:
        key = key_of(replica.row)
        line = self._lines.get(key)
        if line is not None:
            self.slots.grant(key, line)
            if not line.is_asleep:
                self._waker.rest(key)


def _waiter(came_s: float, until_s: float) -> Waiter:
    return Waiter(asyncio.get_running_loop().create_future(), came_s, until_s)
