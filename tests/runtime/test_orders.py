"""What a parked pod makes of its orders, in one process: a bind has an end, and belongs to nobody's connection."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from contracts.errors import Conflict, Refused, Unavailable
from contracts.jobs import Bind, Parked, RuntimeState, Take
from contracts.traffic_errors import DeadlineExceeded
from runtime.control_api import Orders
from runtime.replica import Replica
from runtime.serving import Served, Wiring
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import DEADLINE_S, fake_work, saying
from tests.runtime.test_replica import replica_of

PARKED = Parked(device_class="cpu-1", threads=1, kv_bytes=1 << 20, store="s3://models/prod")
TAKE = Take(tenant="acme", model="m", version="ab" * 32, device_class="cpu-1", store="s3://models/prod", weight_bytes=9)


def play(
    tmp_path: Path, scene: Callable[[Orders, Replica, threading.Event], Awaitable[None]], within_s: float = DEADLINE_S
) -> None:
    """A restore goes on once the event is set."""
    goes_on, work = threading.Event(), fake_work(ScriptedEngine(saying("hello")))

    def slow(request: Bind, wiring: Wiring) -> Served:
        assert goes_on.wait(DEADLINE_S)
        return work.restore(request, wiring)

    async def main() -> None:
        replica = replica_of(tmp_path, replace(work, restore=slow))
        try:
            await scene(Orders(PARKED, replica, asyncio.Event(), within_s), replica, goes_on)
        finally:
            goes_on.set()
            await replica.close()

    asyncio.run(main())


def test_a_restore_that_hangs_ends(tmp_path: Path) -> None:
    """In a process that has failed, so that another one takes its place; who asks again hears the same."""

    async def scene(orders: Orders, replica: Replica, _: threading.Event) -> None:
        for _again in range(2):
            with pytest.raises(Refused) as caught:
                await orders.bind(TAKE)
            assert isinstance(caught.value.failure, DeadlineExceeded)
        assert replica.state is RuntimeState.FAILED
        assert replica.over.is_set()

    play(tmp_path, scene, within_s=0.05)


async def test_a_warm_up_that_hangs_keeps_no_order_waiting(tmp_path: Path) -> None:
    """A driver may hang when it is first used. The process has failed then, too, though nothing was begun."""
    goes_on = threading.Event()

    def hang() -> None:
        assert goes_on.wait(DEADLINE_S)

    replica = replica_of(tmp_path, replace(fake_work(ScriptedEngine(saying("hello"))), warm_up=(hang,)))
    warming = asyncio.create_task(replica.warm_up(0))
    try:
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await Orders(PARKED, replica, asyncio.Event(), 0.05).bind(TAKE)
        assert isinstance(caught.value.failure, DeadlineExceeded)
        assert replica.state is RuntimeState.FAILED
        assert replica.over.is_set()
    finally:
        goes_on.set()
        await warming
        await replica.close()


def test_who_asked_is_cut(tmp_path: Path) -> None:
    """The bind goes on; the next one to ask for the same gets its answer, another version none."""

    async def scene(orders: Orders, replica: Replica, goes_on: threading.Event) -> None:
        first = asyncio.create_task(orders.bind(TAKE))
        while replica.state is not RuntimeState.RESTORING:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Refused) as caught:
            await orders.bind(msgspec.structs.replace(TAKE, version="cd" * 32))
        assert isinstance(caught.value.failure, Conflict)
        goes_on.set()
        assert (await orders.bind(TAKE)).runtime_id == replica.runtime_id
        assert replica.report().state is RuntimeState.READY
        replica.drain()
        with pytest.raises(Refused) as caught:
            await orders.bind(TAKE)
        assert isinstance(caught.value.failure, Unavailable), "it ends"

    play(tmp_path, scene)
