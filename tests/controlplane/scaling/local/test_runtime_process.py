"""RuntimeProcess on real processes: a process ends for certain, its death is noticed, and no other process gets a
signal.
"""

import os
import signal
import time

import pytest

from kelvin.contracts.errors import Refused, Unavailable
from tests.controlplane.machine_fixture import RunDirectory, local
from tests.eventually import eventually


async def test_sigterm_ends_a_process(run: RunDirectory) -> None:
    """It ends long before SIGKILL would come."""
    async with local(run, standbys=0) as it:
        process = await it.fleet.fork_standby()
        began = time.monotonic()
        it.fleet.end(process, term_s=90.0)
        it.fleet.end(process, term_s=90.0)
        assert await process.wait_gone(60.0)
        assert time.monotonic() - began < 60.0
        assert list(it.table) == []


async def test_sigkill_ends_a_process_that_ignores_sigterm(run: RunDirectory) -> None:
    """It is dead shortly after `term_s`."""
    run.tell("ignore-term")

    async with local(run, standbys=0) as it:
        process = await it.fleet.fork_standby()
        process.signal(signal.SIGTERM)
        assert not await process.wait_gone(0.1)
        it.fleet.end(process, term_s=0.1)
        assert await process.wait_gone(60.0)


async def test_dead_process_refuses_calls_and_signals(run: RunDirectory) -> None:
    """Calls are refused, and signals are not sent: another process may have the pid by now."""
    async with local(run, standbys=0) as it:
        process = await it.fleet.fork_standby()
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait_gone(60.0)
        with pytest.raises(Refused) as refused:
            await process.report()
        assert refused.value.failure == Unavailable("the runtime")
        process.signal(signal.SIGKILL)
        await process.end()


async def test_death_is_noticed_with_an_unremovable_socket(run: RunDirectory) -> None:
    """For example on a disk that became read-only. The device slot is freed."""
    async with local(run, standbys=0) as it:
        process = await it.fleet.fork_standby()
        socket = run.path / f"rt-{process.runtime_id}.sock"
        socket.unlink()
        socket.mkdir()
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: list(it.table) == [])


async def test_standby_that_never_parks_is_ended(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive and silent. It is ended, and the fork fails."""
    monkeypatch.setattr("controlplane.scaling.local.fleet.PARK_S", 0.1)
    run.tell("never-park")

    async with local(run, standbys=0) as it:
        with pytest.raises(Refused) as refused:
            await it.fleet.fork_standby()
        assert refused.value.failure == Unavailable("the zygote")
        await eventually(lambda: list(it.table) == [])
