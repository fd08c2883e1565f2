"""Several activators at the same replicas, on virtual time: together they never exceed a replica's streams, each gets
its share, and no caller sees a refusal.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.replica_credit import CREDIT_VALID_S, TRY_S
from activator.queue.slot_allocator import ActivatorPeers
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused
from runtime.lifecycle.credit_policy import CLAIM_TTL_S, DEMAND_TTL_S, Credits
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, SlotWorld, queue_limits

LONG_S = 10_000.0


@dataclass
class Streams:
    """A replica. With `is_old` it knows no credit and accepts every request."""

    credits: Credits
    is_old: bool = False
    most: int = 0
    refusals: int = 0
    entered: list[str] = field(default_factory=list)  # activators whose requests it accepted, in order


class SimulatedActivator(SlotWorld):
    """One activator. `served` counts its answers by tenant. `delay_s` bounds the time of each message."""

    def __init__(
        self,
        name: str,
        members: tuple[str, ...],
        replicas: dict[str, Streams],
        draw: random.Random,
        delay_s: float,
        most_waiting: int,
    ) -> None:
        super().__init__(
            *(replica_row(each, streams.credits.streams) for each, streams in replicas.items()),
            limits=queue_limits(version=most_waiting, wait_s=LONG_S), draw=draw.randrange,
            peers=ActivatorPeers(name, lambda: members),
        )  # fmt: skip
        self.name = name
        self.replicas = replicas
        self.served: Counter[str] = Counter()
        self.inside = 0  # accepted by replicas
        self._draw = draw
        self._delay_s = delay_s

    async def complete(self, answer_duration_s: float, tenant: str = "t", within_s: float = LONG_S) -> None:
        """Send one request as `attempts.py` does, until its answer ends. Raises what the caller would see."""
        ask = QueuedRequest(tenant, 10, 10)
        async with self.throttler.slot(KEY, ask, Deadline(self.clock() + within_s)) as slot:
            while True:
                replica = slot.replica
                streams = self.replicas[replica.row.runtime_id]
                wants = replica.wanted_slots
                await self._travel()
                if streams.is_old:
                    streams.credits.enter(self.name, self.clock())
                    break
                if streams.credits.try_enter(self.name, wants, self.clock()):
                    break
                streams.refusals += 1
                credit = streams.credits.credit_of(self.name, self.clock())
                await self._travel()
                self.throttler.report_full(replica, credit)
                await slot.requeue()
            streams.entered.append(self.name)
            streams.most = max(streams.most, streams.credits.active_requests)
            self.inside += 1
            try:
                await asyncio.sleep(answer_duration_s / 2)
                reported_credit = None if streams.is_old else streams.credits.credit_of(self.name, self.clock())
                await self._travel()
                self.throttler.report_response_started(replica, reported_credit)
                await asyncio.sleep(answer_duration_s / 2)
            finally:
                streams.credits.leave(self.name)
                self.inside -= 1
            await self._travel()
        self.served[tenant] += 1
        self.throttler.check_integrity()

    async def clients(self, count: int, until_s: float, answer_duration_s: float, tenant: str = "t") -> None:
        """Run so many clients, each of which sends its next request at once."""

        async def client() -> None:
            while self.clock() < until_s:
                await self.complete(answer_duration_s * self._draw.uniform(0.5, 1.5), tenant)

        await asyncio.gather(*(client() for _ in range(count)))

    async def _travel(self) -> None:
        await asyncio.sleep(self._draw.uniform(0.0, self._delay_s))


def activators_at(
    count: int,
    replicas: dict[str, Streams],
    draw: random.Random,
    *,
    known: bool = False,
    delay_s: float = 0.01,
    most_waiting: int = 10_000,
) -> list[SimulatedActivator]:
    """Return so many activators, which know of each other or not."""
    names = tuple(f"door-{number}" for number in range(count))
    return [SimulatedActivator(name, names if known else (), replicas, draw, delay_s, most_waiting) for name in names]


@pytest.mark.virtual_time
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    activators=st.integers(1, 6),
    streams=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    known=st.booleans(),
    delay_s=st.sampled_from([0.0, 0.001, 0.05]),
)
async def test_activators_never_exceed_a_replicas_streams(
    seed: int, activators: int, streams: list[int], known: bool, delay_s: float
) -> None:
    """Requests arrive at random, and answers and messages take any time. Every request is answered, and each activator
    gets its share, even with more activators than streams.
    """

    draw = random.Random(seed)
    replicas = {f"r{number}": Streams(Credits(many)) for number, many in enumerate(streams)}
    every = activators_at(activators, replicas, draw, known=known, delay_s=delay_s)

    async def arrive(number: int) -> None:
        await asyncio.sleep(draw.uniform(0.0, 3.0))
        await every[number].clients(sum(streams) + 2, 20.0, 0.5)

    await asyncio.gather(*map(arrive, range(activators)))
    for each in replicas.values():
        assert each.most <= each.credits.streams
        assert each.credits.active_requests == 0
        each.credits.check_integrity()
    fair = sum(streams) * 17.0 / 0.5 / activators
    assert min(door.served.total() for door in every) >= 0.2 * fair
    if activators == 1:
        assert every[0].throttler.full_refusals == 0


@pytest.mark.virtual_time
async def test_only_busy_activator_gets_all_streams() -> None:
    """Two activators know of each other. While one is idle, the other has all streams after its first answer. When both
    are busy each has half. When one ends, the other has all again within an answer.
    """

    replica = Streams(Credits(8))
    one, two = activators_at(2, {"a": replica}, random.Random(1), known=True)
    first = asyncio.ensure_future(one.clients(20, 30.0, 1.0))
    await asyncio.sleep(0.1)
    assert one.inside == 4, "its share, without a credit"
    await asyncio.sleep(0.8)
    assert one.inside == 8
    second = asyncio.ensure_future(two.clients(20, 15.0, 1.0))
    await asyncio.sleep(5.0)
    found = []
    for _ in range(20):
        await asyncio.sleep(0.25)
        found.append((one.inside, two.inside))
    assert all(3 <= inside <= 5 for pair in found[4:] for inside in pair), found
    await second
    await asyncio.sleep(CREDIT_VALID_S + 2.0)
    assert one.inside >= 7
    await first


@pytest.mark.virtual_time
async def test_waiting_activator_retries_behind_long_responses() -> None:
    """The other activator ended meanwhile, and no answer says so. After TRY_S the waiting one tries."""

    replica = Streams(Credits(4))
    one, two = activators_at(2, {"a": replica}, random.Random(1), known=True)
    theirs = [asyncio.ensure_future(two.complete(20.0)) for _ in range(4)]
    await asyncio.sleep(12.0)
    ours = [asyncio.ensure_future(one.complete(1000.0)) for _ in range(4)]
    await asyncio.gather(*theirs)
    began_s = one.clock()
    while one.inside < 4 and one.clock() < began_s + 600.0:
        await asyncio.sleep(0.1)
    assert one.inside == 4
    assert one.clock() - began_s < 4 * TRY_S + CLAIM_TTL_S
    for each in ours:
        each.cancel()
    await asyncio.gather(*ours, return_exceptions=True)
    one.throttler.check_integrity()


@pytest.mark.parametrize("claims", [pytest.param(True, id="claims"), pytest.param(False, id="control: no claims")])
@pytest.mark.virtual_time
async def test_distant_activator_does_not_starve(claims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream is refilled by a near activator the moment it is free. Control: no claims."""
    if not claims:
        monkeypatch.setattr(Credits, "_reserved_streams", lambda self, activator, state: 0)

    replica = Streams(Credits(1))
    (near,) = activators_at(1, {"a": replica}, random.Random(1), delay_s=0.0)
    (_, far) = activators_at(2, {"a": replica}, random.Random(2), delay_s=0.05)
    await asyncio.gather(near.clients(3, 60.0, 1.0), asyncio.wait_for(far.clients(3, 60.0, 1.0), 70.0))
    assert (far.served["t"] >= 15) == claims, (far.served, near.served)


@pytest.mark.virtual_time
async def test_full_replica_is_tried_a_few_times_per_second() -> None:
    """A hundred requests wait for half a minute. The replica is tried a few times per second in total."""

    replica = Streams(Credits(2))
    one, two = activators_at(2, {"a": replica}, random.Random(1))
    theirs = [asyncio.ensure_future(two.complete(30.0)) for _ in range(2)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(0.1)) for _ in range(100)]
    await asyncio.gather(*theirs)
    assert 10 <= replica.refusals <= 120
    await asyncio.gather(*ours)
    assert one.served["t"] == 100


@pytest.mark.virtual_time
async def test_a_refusal_does_not_keep_guests_out() -> None:
    """The stream that may be tried after a refusal is open to guests too, although one is reserved for the owner: the
    activator's share has more.
    """

    replica = Streams(Credits(8))
    one, two = activators_at(2, {"a": replica}, random.Random(1))
    await one.complete(1.0, KEY.tenant)
    runs = asyncio.ensure_future(one.complete(100.0, "guest"))
    await asyncio.sleep(0.5)
    theirs = [asyncio.ensure_future(two.complete(3.0)) for _ in range(7)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(1.0, "guest")) for _ in range(3)]
    await asyncio.gather(*theirs)
    assert one.throttler.full_refusals > 0
    began_s = one.clock()
    await asyncio.gather(*ours)
    assert one.clock() - began_s < 1.0 + 2 * TRY_S
    runs.cancel()
    await asyncio.gather(runs, return_exceptions=True)


@pytest.mark.virtual_time
async def test_a_pause_refuses_nobody_for_its_time() -> None:
    """The expected wait counts the activator's share of the full replica, not the one stream that is tried. No deadline
    is found too short.
    """

    replica = Streams(Credits(8))
    one, two = activators_at(2, {"a": replica}, random.Random(1), known=True)
    for _ in range(3):  # so that the throughput is known
        await asyncio.gather(*(one.complete(1.0) for _ in range(8)))
    await asyncio.sleep(DEMAND_TTL_S)
    await two.complete(1.0)
    theirs = [asyncio.ensure_future(two.complete(3.0)) for _ in range(8)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(1.0)) for _ in range(4)]
    await asyncio.sleep(0.5)
    assert one.throttler.full_refusals > 0
    ours += [asyncio.ensure_future(one.complete(1.0, within_s=8.0)) for _ in range(12)]
    await asyncio.gather(*theirs, *ours)


@pytest.mark.virtual_time
async def test_a_refused_request_keeps_its_place() -> None:
    """A refused request is served before later ones of its tenant, and its charge is undone."""

    replica = Streams(Credits(1))
    one, two = activators_at(2, {"a": replica}, random.Random(1), delay_s=0.0)
    theirs = asyncio.ensure_future(two.complete(10.0))
    await asyncio.sleep(1.0)
    order: list[str] = []

    async def ask(name: str, tenant: str) -> None:
        await one.complete(1.0, tenant)
        order.append(name)

    ours = []
    for number in range(4):
        for tenant in "tu":
            ours.append(asyncio.ensure_future(ask(f"{tenant}{number}", tenant)))
            await asyncio.sleep(0.001)
    await asyncio.gather(theirs, *ours)
    assert one.throttler.full_refusals > 3
    assert order == ["t0", "u0", "t1", "u1", "t2", "u2", "t3", "u3"]


@pytest.mark.virtual_time
async def test_hedge_reports_the_slots_wanted_at_its_replica() -> None:
    """The hedge reports the slots wanted at its own replica, not those of the last request sent there."""

    replicas = {name: Streams(Credits(8)) for name in "ab"}
    (one,) = activators_at(1, replicas, random.Random(1), delay_s=0.0)
    burst = [asyncio.ensure_future(one.complete(1.0)) for _ in range(40)]
    await asyncio.gather(*burst)
    ask, deadline = QueuedRequest("t", 10, 10), Deadline(one.clock() + 60.0)
    async with one.throttler.slot(KEY, ask, deadline) as first:
        second = one.throttler.try_take_slot_elsewhere(KEY, ask, deadline, first.replica)
        assert second is not None
        assert second.replica.wanted_slots == 1
        second.release()


@pytest.mark.virtual_time
async def test_full_queue_keeps_a_refused_request() -> None:
    """The refused request was sent before those that fill the queue, so it waits beyond the limit."""

    replica = Streams(Credits(1))
    one, two = activators_at(2, {"a": replica}, random.Random(1), most_waiting=3)
    theirs = asyncio.ensure_future(two.complete(5.0))
    await asyncio.sleep(0.1)
    ours = [asyncio.ensure_future(one.complete(1.0)) for _ in range(4)]
    await asyncio.sleep(1.0)
    assert one.throttler.queue_length(KEY) == 4
    with pytest.raises(Refused):
        await one.complete(1.0)
    await asyncio.gather(theirs, *ours)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.virtual_time
async def test_replica_without_credit_is_shared_equally(known: bool) -> None:
    """The replica reports no credit. Each activator keeps its share and tries no more. One that knows of no other uses
    all streams.
    """

    replica = Streams(Credits(8), is_old=True)
    every = activators_at(2, {"a": replica}, random.Random(1), known=known)
    await asyncio.gather(*(door.clients(20, 20.0, 1.0) for door in every))
    assert replica.most == (8 if known else 16)


@pytest.mark.virtual_time
async def test_replicas_come_and_go_while_one_is_refused() -> None:
    """The request goes to a replica with a stream. With no replica left it waits for a start."""

    full, other = Streams(Credits(1)), Streams(Credits(1))
    one, two = activators_at(2, {"a": full}, random.Random(1))
    theirs = asyncio.ensure_future(two.complete(100.0))
    await asyncio.sleep(0.1)
    ours = asyncio.ensure_future(one.complete(1.0))
    await asyncio.sleep(1.0)
    one.replicas["b"] = other
    one.feed(replica_row("b", 1))
    await asyncio.sleep(2.0)
    assert ours.done()
    assert other.entered == ["door-0"]
    other.credits.enter("door-2", one.clock())
    waits = asyncio.ensure_future(one.complete(1.0))
    await asyncio.sleep(1.0)
    one.feed(removed_replicas=("a", "b"))
    other.credits.leave("door-2")
    await asyncio.sleep(5.0)
    assert one.throttler.queue_length(KEY) == 1
    one.feed(replica_row("b", 1))
    await waits
    theirs.cancel()
    await asyncio.gather(theirs, return_exceptions=True)
