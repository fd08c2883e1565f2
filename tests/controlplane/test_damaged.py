"""A replica whose memory was found wrong is sent away at once; others, and a cache that is away, change nothing."""

import asyncio

from contracts.errors import Refused, Unavailable
from controlplane.damaged import DamageLoop
from controlplane.policy.replica_life import ReplicaState
from telemetry.policy.instruments import Page
from tests.controlplane.builders import key
from tests.controlplane.ground import Run, local
from tests.eventually import eventually


def test_it_is_sent_away(run: Run) -> None:
    """By its process's number, and told why, though it is busy; the one beside it serves on. It is counted once."""

    async def main() -> None:
        async with local(run) as it:
            damaged: set[int] = set()

            async def ask() -> frozenset[int]:
                if not damaged:
                    raise Refused(Unavailable("cache"))
                return frozenset(damaged)

            page = Page("controlplane")
            loop = DamageLoop(ask, it.fleet, it.actuator.condemn, page)
            await loop.look()
            for name in ("busy", "b"):
                it.apply(key(name), 1)
                await it.ready(key(name))
            await loop.look()
            assert it.table.ready(key("busy")) == 1
            (one,) = it.table.of(key("busy"))
            damaged.add(one.pid)
            await loop.look()
            assert it.table[one.runtime_id].state is ReplicaState.DRAINING
            await loop.look()
            assert (it.table.ready(key("busy")), it.table.ready(key("b"))) == (0, 1)
            await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")
            assert f"condemn {one.runtime_id}" in (run.path / "calls.log").read_text()
            (counted,) = [family for family in page.families() if family.name == "kelvin_condemned_replicas_total"]
            assert counted.values == {(): 1}

    asyncio.run(main())


def test_one_that_drains_already_is_told(run: Run) -> None:
    """What it still answers would be said from wrong memory."""

    async def main() -> None:
        async with local(run) as it:
            it.apply(key("busy"), 1)
            await it.ready(key("busy"))
            (one,) = it.table.of(key("busy"))

            async def ask() -> frozenset[int]:
                return frozenset({one.pid})

            it.actuator.drain(it.fleet[one.runtime_id])
            await DamageLoop(ask, it.fleet, it.actuator.condemn, Page("controlplane")).look()
            await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")

    asyncio.run(main())
