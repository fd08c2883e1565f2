"""A replica whose memory was found wrong is drained; others, and a cache that is away, change nothing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import Refused, Unavailable
from controlplane.damaged import DamageLoop
from controlplane.policy.replica_life import ReplicaState
from tests.controlplane.builders import key
from tests.controlplane.ground import Run, eventually, fake_zygote, local


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    where = Run(tmp_path / "run")
    with fake_zygote(where):
        yield where


def test_it_is_drained(run: Run) -> None:
    """By its process's number; the one beside it serves on."""

    async def main() -> None:
        async with local(run) as it:
            damaged: set[int] = set()

            async def ask() -> frozenset[int]:
                if not damaged:
                    raise Refused(Unavailable("cache"))
                return frozenset(damaged)

            loop = DamageLoop(ask, it.fleet, it.actuator.drain)
            await loop.look()
            for name in ("a", "b"):
                it.apply(key(name), 1)
                await it.ready(key(name))
            await loop.look()
            assert it.table.ready(key("a")) == 1
            (one,) = it.table.of(key("a"))
            damaged.add(one.pid)
            await loop.look()
            assert it.table[one.runtime_id].state is ReplicaState.DRAINING
            await loop.look()
            assert (it.table.ready(key("a")), it.table.ready(key("b"))) == (0, 1)
            await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")

    asyncio.run(main())
