"""Queues of several activators for one version, served side by side, and a store for them in this process."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from activator.keys import VersionKey
from activator.policy.ask import Ask
from activator.policy.bounds import UNBOUNDED
from activator.policy.crowd import Crowd
from activator.policy.fair import FairQueue
from activator.policy.turns import SharedCounters
from activator.shared_turns import MEET, SharedTurns, Store
from tests.activator.test_rates import Clock

KEY = VersionKey("owner", "m", "f" * 64)
LARGEST = 100


@dataclass
class InProcess:
    """What the script does (`shared_turns.MEET`), in Python; the suite of the real one is its proof."""

    is_up: bool = True
    members: int = 2
    commands: int = 0
    epoch: str = ""
    floors: dict[str, float] = field(default_factory=dict)
    values: dict[tuple[str, str], float] = field(default_factory=dict)

    async def ask(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """See `shared_turns.Store`."""
        assert script == MEET
        assert keys == (f"kelvin:{{owner/{KEY.version}}}:turns",)
        self.commands += 1
        words = iter(map(str, arguments))
        asker, fresh, _, most, groups = (next(words) for _ in range(5))
        if len(self.values) > int(most) or not self.epoch:
            self.epoch, self.floors, self.values = fresh, {}, {}
        in_step, out = asker == self.epoch, [self.epoch]
        for _ in range(int(groups)):
            group, own_floor, rows = next(words), float(next(words)), int(next(words))
            floor = self.floors.get(group, own_floor)
            floor = self.floors[group] = max(floor, own_floor) if in_step else floor
            out.append(repr(floor))
            for _ in range(rows):
                key, own, more, least = next(words), float(next(words)), float(next(words)), next(words)
                known = self.values.get((group, key))
                if not in_step:
                    value = max(floor if known is None else known, floor + max(0.0, own - own_floor))
                elif known is not None:
                    value = max(known + more, float(least)) if least else known + more
                else:
                    value = max(own, floor)
                self.values[group, key] = value
                out.append(repr(value))
        return [each.encode() for each in out]


class Side:
    """One activator's queue. Who waits is a number; a clock for all sides."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.queue: FairQueue[Any] = FairQueue(Crowd(UNBOUNDED), UNBOUNDED, SharedCounters)
        self.turns = SharedTurns(store, clock)
        self.waiting = Counter[str]()
        self.served = 0  # tokens
        self._arrived = 0

    def put(self, tenant: str, tokens: int, weight: int = 1) -> None:
        """Somebody comes who finds no slot."""
        self._arrived += 1
        self.waiting[tenant] += 1
        self.queue.put(self._arrived, Ask(tenant, 0, tokens, weight=weight), 0.0)
        self.turns.waits(KEY, self.queue)

    def take(self, took: float) -> tuple[str, int]:
        """The next is served, and took that part of what was thought; whose, and how many tokens."""
        found = self.queue.take()
        assert found is not None
        ask = found[1]
        self.waiting[ask.tenant] -= 1
        self.turns.gave(KEY, self.queue)
        tokens = max(1, int(ask.tokens * took))
        self.queue.settle(ask, tokens)
        self.served += tokens
        self.queue.check_integrity()
        return ask.tenant, tokens


@dataclass
class Run:
    """What tenants were given in all."""

    sides: list[Side]
    clock: Clock
    draw: random.Random
    given: Counter[str] = field(default_factory=Counter)
    ahead: list[int] = field(default_factory=list)  # of "t" before "u", after each request

    async def step(self, standing: list[str]) -> None:
        """One request, at the side that has served the least. `standing`: of each side the tenants that always wait."""
        for side, tenants in zip(self.sides, standing, strict=True):
            for tenant in tenants:
                while side.waiting[tenant] < 1 + self.draw.randrange(3):
                    side.put(tenant, self.draw.randint(1, LARGEST))
        side = min(self.sides, key=lambda each: each.served)
        tenant, tokens = side.take(self.draw.random())
        self.given[tenant] += tokens
        self.ahead.append(self.given["t"] - self.given["u"])
        self.clock.now_s += 0.02
        if self.draw.randrange(2):  # else the answers are on their way a little longer
            await self.heard()

    async def heard(self) -> None:
        """All answers have come."""
        await asyncio.gather(*(side.turns.close() for side in self.sides))

    @property
    def unfairness(self) -> int:
        """The most that one of the two was given more than the other between any two moments, in tokens."""
        return max(self.ahead) - min(self.ahead)
