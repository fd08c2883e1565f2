"""`python -m controlplane` as the supervisor runs it: quick to start, gone on SIGTERM, no loss when it is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from contracts.wire import encode
from controlplane.settings import load
from service.decider import try_hold
from service.unix import SocketDirectory
from tests.controlplane.builders import key, registration, stats
from tests.controlplane.door import Door, knocking, program
from tests.controlplane.ground import ROOT, Run
from tests.eventually import eventually


async def ready(data: Path) -> None:
    """Until it answers so."""
    await eventually(lambda: (data / "run" / "control.sock").exists())
    async with knocking(data) as door:
        async with asyncio.timeout(60):
            while True:
                try:
                    if (await door.ask("GET", "/readyz"))[0] == 200:
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.005)


async def _replicas(door: Door) -> list[dict[str, object]]:
    _, found = await door.admin("GET", "/models/m")
    return [replica for version in found["versions"] for replica in version["replicas"]]


def test_it_starts_in_an_empty_directory(data: Path) -> None:
    """Ready soon after it was spawned, with keys and a database. The second that it may take is measured, not asserted:
    a busy machine is no defect; ten of a processor's are."""
    with program(data) as process:
        asyncio.run(ready(data))
        used = psutil.Process(process.pid).cpu_times()
        assert used.user + used.system < 10
    assert {"admin.key", "default.key", "kelvin.db"} <= {path.name for path in data.iterdir()}


def test_nobody_else_decides_while_it_lives(data: Path) -> None:
    """It holds the lock under which an activator would stand in for it, until it is dead, however it dies."""
    with closing(SocketDirectory(data / "run")) as directory, program(data) as process:
        asyncio.run(ready(data))
        assert try_hold(directory) is None
        process.kill()
        process.wait(60)
        held = try_hold(directory)
        assert held is not None
        held.close()


def test_sigterm_ends_it_and_leaves_runtimes(data: Path) -> None:
    """Exit 0 with a feed open and a standby parked; the standby lives on."""

    async def main() -> None:
        await ready(data)
        run = Run(data / "run")
        await eventually(lambda: len(run.sockets()) == 1)
        async with knocking(data) as door, door.session.get("http://control/internal/v1/feed") as feed:
            await feed.content.readline()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert len(run.sockets()) == 1

    with program(data) as process:
        asyncio.run(main())


def test_its_lifeline_ends_it(data: Path) -> None:
    """When the supervisor is gone, so is it."""
    read, write = os.pipe()
    os.set_inheritable(read, True)
    environment = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_LIFELINE_FD": str(read)}
    process = subprocess.Popen(
        [sys.executable, "-m", "controlplane"], cwd=ROOT, env=environment, pass_fds=[read], stderr=subprocess.DEVNULL
    )
    os.close(read)
    asyncio.run(ready(data))
    os.close(write)
    assert process.wait(60) in (0, 1)


@pytest.mark.deep
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_runtimes_outlive_it_and_are_adopted(data: Path, ending: signal.Signals) -> None:
    """Killed with a replica ready: the replica is the same process afterwards, known at once, and still watched."""

    async def first() -> dict[str, object]:
        await ready(data)
        async with knocking(data) as door:
            await door.ask("POST", "/internal/v1/versions", encode(registration()))
            await door.ask("POST", "/internal/v1/stats", encode(stats(key())))
            async with asyncio.timeout(60):
                while not (found := await _replicas(door)) or found[0]["state"] != "ready":
                    await asyncio.sleep(0.005)
            return found[0]

    async def second(before: dict[str, object]) -> None:
        await ready(data)
        async with knocking(data) as door:
            assert await _replicas(door) == [before]
            await door.ask("POST", "/internal/v1/stats", encode(stats(key())))
            os.kill(int(str(before["pid"])), signal.SIGKILL)
            async with asyncio.timeout(60):
                while {each["runtime_id"] for each in await _replicas(door)} <= {before["runtime_id"]}:
                    await asyncio.sleep(0.005)
                while len(Run(data / "run").calls("bind:m")) < 2:
                    await asyncio.sleep(0.005)

    with program(data) as process:
        before = asyncio.run(first())
        process.send_signal(ending)
        process.wait(60)
    assert Path(f"/proc/{before['pid']}").exists(), "it serves on while no control plane is there"
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with program(data):
        asyncio.run(second(before))
    assert len(Run(data / "run").calls("bind:m")) == 2


@pytest.mark.deep
def test_a_kill_at_any_moment_of_a_push_loses_no_acknowledged_version(data: Path) -> None:
    """Versions are pushed one after another until SIGKILL comes in between: all that were answered are there."""

    async def push_until_killed() -> list[str]:
        await ready(data)
        acknowledged: list[str] = []
        async with knocking(data) as door:
            for number in range(10_000):
                base = registration()
                version = f"{number:064x}"
                body = msgspec.json.encode(
                    type(base)(**{name: getattr(base, name) for name in base.__struct_fields__} | {"version": version})
                )
                if number == 25:
                    asyncio.get_running_loop().call_later(0.05, process.kill)
                try:
                    status, _ = await door.ask("POST", "/internal/v1/versions", body)
                except aiohttp.ClientError:
                    break
                assert status == 201
                acknowledged.append(version)
        return acknowledged

    async def known() -> set[str]:
        await ready(data)
        async with knocking(data) as door:
            _, found = await door.admin("GET", "/models/m")
            return {version["version"] for version in found["versions"]}

    with program(data) as process:
        acknowledged = asyncio.run(push_until_killed())
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with program(data):
        found = asyncio.run(known())
    assert len(acknowledged) >= 25
    assert set(acknowledged) <= found
    assert len(found) <= len(acknowledged) + 1


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        pytest.param("KELVIN_DATA", "", "is required", id="no data directory"),
        pytest.param("KELVIN_STANDBYS", "-1", "must be 0 or more", id="fewer than no standbys"),
        pytest.param("KELVIN_STANDBY_TARGET", "1", "must be 0.9999 or less", id="a certainty that nothing gives"),
        pytest.param("KELVIN_STANDBY_SHARE", "-0.1", "must be 0 or more", id="less than no share"),
        pytest.param("KELVIN_STANDBY_BYTES", "0", "must be 1048576 or more", id="no memory for standbys"),
        pytest.param("KELVIN_DEVICE_SLOTS", "0", "must be 1 or more", id="no device"),
        pytest.param("KELVIN_THREADS", "two", "must be a whole number", id="a word"),
        pytest.param("KELVIN_KV_BYTES", "1", "must be 67108864 or more", id="no memory"),
        pytest.param("KELVIN_SCALE_DOWN_S", "inf", "must be finite", id="for ever"),
    ],
)
def test_bad_settings_are_refused_with_the_value(name: str, value: str, rule: str) -> None:
    """Variable, value and rule."""
    with pytest.raises(ValueError, match=f"{name}={value}: {rule}"):
        load({"KELVIN_DATA": "/somewhere", name: value})
