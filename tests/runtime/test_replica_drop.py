"""A replica that sleeps drops its weights: nothing else does, and a wake comes after it or before it."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from contracts.errors import Conflict, Failure, Internal, Refused
from contracts.jobs import RuntimeState
from contracts.meter import Phase
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import BIND, fake_work, saying
from tests.runtime.test_replica import meter_of, replica_of


async def test_who_dropped_its_weights_says_so_and_wakes_to_its_own_version(tmp_path: Path) -> None:
    """No lease is left; still nobody's time, still no other version; where bytes came from is told anew."""
    replica = replica_of(tmp_path)
    await replica.bind(BIND)
    with pytest.raises(Refused) as caught:
        await replica.drop()
    assert isinstance(caught.value.failure, Conflict), "who serves has to sleep first"
    await replica.sleep()
    await replica.drop()
    report = replica.report()
    assert (report.state, report.version, report.leases) == (RuntimeState.ASLEEP2, BIND.version, 0)
    assert meter_of(tmp_path) is Phase.STANDBY
    with pytest.raises(Refused):
        await replica.sleep()
    with pytest.raises(Refused) as caught:
        await replica.wake(msgspec.structs.replace(BIND, version="f" * 64))
    assert isinstance(caught.value.failure, Conflict)
    await replica.wake(BIND)
    assert meter_of(tmp_path) is Phase.IDLE
    assert replica.report().leases == 1
    await replica.close()


@pytest.mark.parametrize("failure", [Internal(), None], ids=["refused", "a defect"])
async def test_who_can_t_drop_its_weights_ends(tmp_path: Path, failure: Failure | None) -> None:
    """What still looks into memory that is to go must not serve again."""

    def clinging() -> None:
        raise Refused(failure) if failure is not None else RuntimeError("defect")

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(saying("hello")), drop=clinging))
    await replica.bind(BIND)
    await replica.sleep()
    with pytest.raises((Refused, RuntimeError)):
        await replica.drop()
    assert replica.failure == Internal()
    assert replica.over.is_set()
    with pytest.raises(Refused):
        await replica.wake(BIND)
    await replica.close()


async def test_replica_that_gives_nothing_back_does_not_sleep(tmp_path: Path) -> None:
    """Its device slot would be given to another version, while its memory is still taken."""

    def clinging() -> None:
        raise RuntimeError("a device that lost its context")

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(saying("hello")), release=clinging))
    await replica.bind(BIND)
    with pytest.raises(RuntimeError):
        await replica.sleep()
    assert replica.failure == Internal()
    assert replica.state is RuntimeState.FAILED
    assert replica.over.is_set()
    await replica.close()


async def test_a_wake_waits_for_a_drop(tmp_path: Path) -> None:
    """One after the other, whoever is quicker: a drop that comes after the wake is refused, and changes nothing."""
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go_on.wait(20)

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(saying("hello")), drop=slow))
    await replica.bind(BIND)
    await replica.sleep()
    dropping = asyncio.create_task(replica.drop())
    await asyncio.to_thread(inside.wait, 20)
    waking, late = asyncio.create_task(replica.wake(BIND)), asyncio.create_task(replica.drop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(asyncio.gather(dropping, waking), 20)
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(late, 20)
    assert isinstance(caught.value.failure, Conflict)
    assert replica.state is RuntimeState.READY
    await replica.close()
