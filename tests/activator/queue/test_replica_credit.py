"""Several activators at the same replicas, on virtual time: together never more than a replica takes, to each its part,
and no caller sees a refusal.
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
    """A replica. `is_old`: it is of a build that knows no credit, and takes what comes."""

    credits: Credits
    is_old: bool = False
    most: int = 0
    refusals: int = 0
    entered: list[str] = field(default_factory=list)  # whose requests it took, in order


class SimulatedActivator(SlotWorld):
    """One activator. `served` counts its answers by tenant; `delay_s` bounds what each message takes."""

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
        self.inside = 0  # taken by replicas
        self._draw = draw
        self._delay_s = delay_s

    async def complete(self, answer_s: float, tenant: str = "t", within_s: float = LONG_S) -> None:
        """One request, from its arrival to the end of its answer: as `attempts.py` sends it. Whatever it raises, its
        caller sees.
        """
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
            streams.most = max(streams.most, streams.credits.inside)
            self.inside += 1
            try:
                await asyncio.sleep(answer_s / 2)
                told = None if streams.is_old else streams.credits.credit_of(self.name, self.clock())
                await self._travel()
                self.throttler.report_began(replica, told)
                await asyncio.sleep(answer_s / 2)
            finally:
                streams.credits.leave(self.name)
                self.inside -= 1
            await self._travel()
        self.served[tenant] += 1
        self.throttler.check_integrity()

    async def clients(self, count: int, until_s: float, answer_s: float, tenant: str = "t") -> None:
        """So many, each of which asks again at once."""

        async def client() -> None:
            while self.clock() < until_s:
                await self.complete(answer_s * self._draw.uniform(0.5, 1.5), tenant)

        await asyncio.gather(*(client() for _ in range(count)))

    async def _travel(self) -> None:
        await asyncio.sleep(self._draw.uniform(0.0, self._delay_s))


def doors(
    count: int,
    replicas: dict[str, Streams],
    draw: random.Random,
    *,
    known: bool = False,
    delay_s: float = 0.01,
    most_waiting: int = 10_000,
) -> list[SimulatedActivator]:
    """So many, which know of each other or not."""
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
    """Whoever comes and when, however long answers and messages take: every request is answered, and each activator
    has its part, also with more activators than streams.
    """

    draw = random.Random(seed)
    replicas = {f"r{number}": Streams(Credits(many)) for number, many in enumerate(streams)}
    every = doors(activators, replicas, draw, known=known, delay_s=delay_s)

    async def come(number: int) -> None:
        await asyncio.sleep(draw.uniform(0.0, 3.0))
        await every[number].clients(sum(streams) + 2, 20.0, 0.5)

    await asyncio.gather(*map(come, range(activators)))
    for each in replicas.values():
        assert each.most <= each.credits.streams
        assert each.credits.inside == 0
        each.credits.check_integrity()
    fair = sum(streams) * 17.0 / 0.5 / activators
    assert min(door.served.total() for door in every) >= 0.2 * fair
    if activators == 1:
        assert every[0].throttler.refusals == 0


@pytest.mark.virtual_time
async def test_only_busy_activator_gets_all_streams() -> None:
    """Of two that know of each other one is idle: after its first answer the other has all streams. Of two that are
    busy each has half, and when one ends the other has all again while an answer lasts.
    """

    replica = Streams(Credits(8))
    one, two = doors(2, {"a": replica}, random.Random(1), known=True)
    first = asyncio.ensure_future(one.clients(20, 30.0, 1.0))
    await asyncio.sleep(0.1)
    assert one.inside == 4, "its share, since it was told nothing"
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
    """The other one has ended meanwhile, and no answer tells it: after a second it finds out by itself."""

    replica = Streams(Credits(4))
    one, two = doors(2, {"a": replica}, random.Random(1), known=True)
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


@pytest.mark.parametrize("claims", [pytest.param(True, id="claims"), pytest.param(False, id="none: the control")])
@pytest.mark.virtual_time
async def test_distant_activator_does_not_starve(claims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream, and another activator that fills it again the moment it is free."""
    if not claims:
        monkeypatch.setattr(Credits, "_kept_for_others", lambda self, name, known: 0)

    replica = Streams(Credits(1))
    (near,) = doors(1, {"a": replica}, random.Random(1), delay_s=0.0)
    (_, far) = doors(2, {"a": replica}, random.Random(2), delay_s=0.05)
    await asyncio.gather(near.clients(3, 60.0, 1.0), asyncio.wait_for(far.clients(3, 60.0, 1.0), 70.0))
    assert (far.served["t"] >= 15) == claims, (far.served, near.served)


@pytest.mark.virtual_time
async def test_a_full_replica_is_not_asked_in_a_spin() -> None:
    """A hundred requests wait for half a minute: it is asked a few times a second, however many they are."""

    replica = Streams(Credits(2))
    one, two = doors(2, {"a": replica}, random.Random(1))
    theirs = [asyncio.ensure_future(two.complete(30.0)) for _ in range(2)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(0.1)) for _ in range(100)]
    await asyncio.gather(*theirs)
    assert 10 <= replica.refusals <= 120
    await asyncio.gather(*ours)
    assert one.served["t"] == 100


@pytest.mark.virtual_time
async def test_a_refusal_does_not_keep_guests_out() -> None:
    """The one stream that may be tried after it is theirs, too, although the owner has one reserved: of the activator's
    part there are more.
    """

    replica = Streams(Credits(8))
    one, two = doors(2, {"a": replica}, random.Random(1))
    await one.complete(1.0, KEY.tenant)
    runs = asyncio.ensure_future(one.complete(100.0, "guest"))
    await asyncio.sleep(0.5)
    theirs = [asyncio.ensure_future(two.complete(3.0)) for _ in range(7)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(1.0, "guest")) for _ in range(3)]
    await asyncio.gather(*theirs)
    assert one.throttler.refusals > 0
    began_s = one.clock()
    await asyncio.gather(*ours)
    assert one.clock() - began_s < 1.0 + 2 * TRY_S
    runs.cancel()
    await asyncio.gather(runs, return_exceptions=True)


@pytest.mark.virtual_time
async def test_a_pause_refuses_nobody_for_its_time() -> None:
    """Requests that come while the replica is full are expected to have the activator's part of it, not the one stream
    that is tried: none is told that its deadline is too short.
    """

    replica = Streams(Credits(8))
    one, two = doors(2, {"a": replica}, random.Random(1), known=True)
    for _ in range(3):  # so that it is known how long answers take
        await asyncio.gather(*(one.complete(1.0) for _ in range(8)))
    await asyncio.sleep(DEMAND_TTL_S)
    await two.complete(1.0)
    theirs = [asyncio.ensure_future(two.complete(3.0)) for _ in range(8)]
    await asyncio.sleep(1.0)
    ours = [asyncio.ensure_future(one.complete(1.0)) for _ in range(4)]
    await asyncio.sleep(0.5)
    assert one.throttler.refusals > 0
    ours += [asyncio.ensure_future(one.complete(1.0, within_s=8.0)) for _ in range(12)]
    await asyncio.gather(*theirs, *ours)


@pytest.mark.virtual_time
async def test_a_refused_request_keeps_its_place() -> None:
    """The tenant's request that was refused goes first, although others of it came before it is sent again; and what it
    was charged is undone: another tenant, which is served in turns with it, has no more of the slots.
    """

    replica = Streams(Credits(1))
    one, two = doors(2, {"a": replica}, random.Random(1), delay_s=0.0)
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
    assert one.throttler.refusals > 3
    assert order == ["t0", "u0", "t1", "u1", "t2", "u2", "t3", "u3"]


@pytest.mark.virtual_time
async def test_a_second_request_wants_what_the_replica_has_then() -> None:
    """Not what was wanted with the last one that was sent there."""

    replicas = {name: Streams(Credits(8)) for name in "ab"}
    (one,) = doors(1, replicas, random.Random(1), delay_s=0.0)
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
    """Its request was sent before those that fill the queue, so it waits in it, beyond the bound."""

    replica = Streams(Credits(1))
    one, two = doors(2, {"a": replica}, random.Random(1), most_waiting=3)
    theirs = asyncio.ensure_future(two.complete(5.0))
    await asyncio.sleep(0.1)
    ours = [asyncio.ensure_future(one.complete(1.0)) for _ in range(4)]
    await asyncio.sleep(1.0)
    assert one.throttler.queued(KEY) == 4
    with pytest.raises(Refused):
        await one.complete(1.0)
    await asyncio.gather(theirs, *ours)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.virtual_time
async def test_replica_without_credit_is_shared_equally(known: bool) -> None:
    """It tells no credit: each activator has its share for good, and does not try more; one that knows of no other has
    all.
    """

    replica = Streams(Credits(8), is_old=True)
    every = doors(2, {"a": replica}, random.Random(1), known=known)
    await asyncio.gather(*(door.clients(20, 20.0, 1.0) for door in every))
    assert replica.most == (8 if known else 16)


@pytest.mark.virtual_time
async def test_replicas_come_and_go_while_one_is_refused() -> None:
    """The request goes where there is a stream; and waits for a start where no replica is left."""

    full, other = Streams(Credits(1)), Streams(Credits(1))
    one, two = doors(2, {"a": full}, random.Random(1))
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
    assert one.throttler.queued(KEY) == 1
    one.feed(replica_row("b", 1))
    await waits
    theirs.cancel()
    await asyncio.gather(theirs, return_exceptions=True)
