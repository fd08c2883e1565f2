"""Activators and replicas on virtual time: real queues, real credits, and a network between that takes its time."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from activator.keys import VersionKey
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.slots import Peers
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from runtime.policy.credit import Credits
from tests.activator.control import VERSION, replica_row
from tests.activator.test_throttler import Bell

KEY = VersionKey("default", "m", VERSION)
LONG_S = 10_000.0


@dataclass
class Streams:
    """A replica. `is_old`: it is of a build that knows no credit, and takes what comes."""

    credits: Credits
    is_old: bool = False
    most: int = 0
    refusals: int = 0
    entered: list[str] = field(default_factory=list)  # whose requests it took, in order


class Door:
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
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.replicas = replicas
        self.served: Counter[str] = Counter()
        self.inside = 0  # taken by replicas
        self._draw = draw
        self._delay_s = delay_s
        wide = Bound(most_waiting, 1 << 40, 1 << 40)
        self.throttler = Throttler(
            QueueLimits(wide, wide, wide, LONG_S), Bell(), peers=Peers(name, lambda: members), clock=self.loop.time,
            draw=draw.randrange,
        )  # fmt: skip
        rows = tuple(replica_row(each, streams.credits.streams) for each, streams in replicas.items())
        self.throttler.apply(Feed(revision=1, replicas=rows))

    async def ask(self, answer_s: float, tenant: str = "t", within_s: float = LONG_S) -> None:
        """One request, from its arrival to the end of its answer: as `attempts.py` sends it. Whatever it raises, its
        caller sees.
        """
        ask = Ask(tenant, 10, 10)
        async with self.throttler.slot(KEY, ask, Deadline(self.loop.time() + within_s)) as slot:
            while True:
                replica = slot.replica
                streams = self.replicas[replica.row.runtime_id]
                wants = replica.wants
                await self._travel()
                if streams.is_old:
                    streams.credits.enter(self.name, self.loop.time())
                    break
                if streams.credits.try_enter(self.name, wants, self.loop.time()):
                    break
                streams.refusals += 1
                credit = streams.credits.credit_of(self.name, self.loop.time())
                await self._travel()
                self.throttler.report_full(replica, credit)
                await slot.exchange()
            streams.entered.append(self.name)
            streams.most = max(streams.most, streams.credits.inside)
            self.inside += 1
            try:
                await asyncio.sleep(answer_s / 2)
                told = None if streams.is_old else streams.credits.credit_of(self.name, self.loop.time())
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
            while self.loop.time() < until_s:
                await self.ask(answer_s * self._draw.uniform(0.5, 1.5), tenant)

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
) -> list[Door]:
    """So many, which know of each other or not."""
    names = tuple(f"door-{number}" for number in range(count))
    return [Door(name, names if known else (), replicas, draw, delay_s, most_waiting) for name in names]
