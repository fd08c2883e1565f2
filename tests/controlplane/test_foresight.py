"""The loop over virtual time: what is due is asked for once, within its allowance, and not where a process has it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from controlplane.facts import VersionKey
from controlplane.foresight import Foresight
from controlplane.policy.breakeven import Gaps
from controlplane.policy.recurrence import DOUBT, Counts, Expected
from tests.controlplane.scaling_world import FAST, Catalogue
from tests.controlplane.virtual_time import VirtualClock


class Stage:
    """Versions that are used when a test says so."""

    def __init__(self, *, least_s: float = 60.0, bytes_per_s: float = 1e6) -> None:
        self.catalogue = Catalogue()
        self.clock = VirtualClock()
        self.gaps: Gaps[VersionKey] = Gaps()
        self.brought: list[tuple[VersionKey, float]] = []
        self.live: set[VersionKey] = set()
        self.foresight = Foresight(
            self.catalogue, self.gaps, lambda key: key in self.live, lambda key, total: 0.1,
            lambda key, worth: self.brought.append((key, worth)), self.clock,
            least_s=least_s, bytes_per_s=bytes_per_s,
        )  # fmt: skip

    def use(self, *keys: VersionKey) -> None:
        for key in keys:
            self.gaps.busy(key, self.clock.monotonic_us() / 1e6)

    async def rhythm(self, times: int, every_s: float, *keys: VersionKey) -> None:
        for _ in range(times):
            self.use(*keys)
            await self.clock.advance(every_s)


def play(stage: Stage, scene: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        task = asyncio.create_task(stage.foresight.run())
        await scene
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(main())


def test_a_rhythm_is_learnt() -> None:
    """At the fourth pause of 100 s the version is brought, once, and shown as expected; then the call comes."""
    stage = Stage()
    which = stage.catalogue.add("m", FAST)

    async def scene() -> None:
        await stage.rhythm(3, 100.0, which)
        stage.use(which)
        assert stage.brought == []
        await stage.clock.advance(99.0)
        assert stage.brought == [(which, DOUBT)]
        seen = stage.foresight.of(which)
        assert isinstance(seen.view, Expected)
        assert seen.is_brought
        stage.use(which)
        await stage.clock.advance(1.5)
        assert stage.foresight.of(which).counts == Counts(came=1)

    play(stage, scene())


def test_who_serves_needs_nothing() -> None:
    """A version that a replica serves is brought once none does any more."""
    stage = Stage()
    which = stage.catalogue.add("m", FAST)

    async def scene() -> None:
        await stage.rhythm(3, 100.0, which)
        stage.live.add(which)
        stage.use(which)
        await stage.clock.advance(95.0)
        assert stage.brought == []
        stage.live.clear()
        await stage.clock.advance(2.0)
        assert len(stage.brought) == 1

    play(stage, scene())


def test_bytes_are_bounded() -> None:
    """Where the first version takes more than the allowance, the second waits until that is made up for."""
    stage = Stage(bytes_per_s=1000.0)
    one, two = (stage.catalogue.add(name, FAST) for name in ("one", "two"))

    async def scene() -> None:
        await stage.rhythm(3, 200.0, one, two)
        stage.use(one, two)
        await stage.clock.advance(185.0)
        assert len(stage.brought) == 2

    play(stage, scene())
    tight = Stage(bytes_per_s=1.0)
    one, two = (tight.catalogue.add(name, FAST) for name in ("one", "two"))

    async def tightly() -> None:
        await tight.rhythm(3, 200.0, one, two)
        tight.use(one, two)
        await tight.clock.advance(199.0)
        assert [key for key, _ in tight.brought] == [one]

    play(tight, tightly())


def test_what_is_gone_and_what_is_off() -> None:
    """A version that was deleted is not brought; where `least_s` is 0 nothing is."""
    for stage in (Stage(), Stage(least_s=0.0)):
        which = stage.catalogue.add("m", FAST)

        async def scene(stage: Stage = stage, which: VersionKey = which) -> None:
            await stage.rhythm(3, 100.0, which)
            stage.use(which)
            if stage.foresight.least_s:
                stage.catalogue.known.clear()
            await stage.clock.advance(200.0)
            assert stage.brought == []

        play(stage, scene())
