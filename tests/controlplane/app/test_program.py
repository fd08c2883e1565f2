"""`python -m controlplane` as a real process: it starts, ends on SIGTERM, and loses nothing when killed."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from controlplane.app.settings import load
from kelvin.contracts.wire import encode
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.standby_lock import try_acquire_standby_lock
from tests.controlplane.builders import registration
from tests.controlplane.control_plane_server import (
    connect_client,
    control_plane_process,
    push,
    report_request,
    wait_for_state,
    wait_ready,
)
from tests.controlplane.machine_fixture import ROOT, RunDirectory
from tests.eventually import eventually


def replicas_of(found: Any) -> list[dict[str, Any]]:
    """Return all replicas in a model's status."""
    return [replica for version in found["versions"] for replica in version["replicas"]]


async def test_control_plane_starts_in_an_empty_directory(data: Path) -> None:
    """It becomes ready and creates keys and a database. A start should take one second, but a busy machine is no
    defect, so the test allows ten seconds of CPU time.
    """
    with control_plane_process(data) as process:
        await wait_ready(data)
        used = psutil.Process(process.pid).cpu_times()
        assert used.user + used.system < 10
    assert {"admin.key", "default.key", "kelvin.db"} <= {path.name for path in data.iterdir()}


async def test_control_plane_holds_the_decision_lock(data: Path) -> None:
    """It holds the lock that keeps an activator's fallback scaler out, until it is dead. SIGKILL releases the lock."""
    with closing(SocketDirectory(data / "run")) as directory, control_plane_process(data) as process:
        await wait_ready(data)
        assert try_acquire_standby_lock(directory) is None
        process.kill()
        process.wait(60)
        held = try_acquire_standby_lock(directory)
        assert held is not None
        held.close()


async def test_sigterm_ends_it_and_leaves_runtimes(data: Path) -> None:
    """It exits with 0 while a feed is open and a standby is parked. The standby lives on."""
    with control_plane_process(data) as process:
        await wait_ready(data)
        run = RunDirectory(data / "run")
        await eventually(lambda: len(run.sockets()) == 1)
        async with connect_client(data) as client, client.session.get("http://control/internal/v1/feed") as feed:
            await feed.content.readline()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert len(run.sockets()) == 1


async def test_closed_lifeline_ends_the_control_plane(data: Path) -> None:
    """The supervisor's end closes the lifeline, and the control plane exits."""
    read, write = os.pipe()
    os.set_inheritable(read, True)
    environment = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_LIFELINE_FD": str(read)}
    process = subprocess.Popen(
        [sys.executable, "-m", "controlplane"], cwd=ROOT, env=environment, pass_fds=[read], stderr=subprocess.DEVNULL
    )
    os.close(read)
    await wait_ready(data)
    os.close(write)
    assert process.wait(60) in (0, 1)


@pytest.mark.deep
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
async def test_runtimes_outlive_a_killed_control_plane(data: Path, ending: signal.Signals) -> None:
    """The replica keeps its process. The new control plane knows it at once, and replaces it when it dies."""
    with control_plane_process(data) as process:
        await wait_ready(data)
        async with connect_client(data) as client:
            await push(client)
            await report_request(client)
            found = await wait_for_state(client, "ready")
        (before,) = replicas_of(found)
        process.send_signal(ending)
        process.wait(60)
    assert Path(f"/proc/{before['pid']}").exists(), "the replica ended with the control plane"
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with control_plane_process(data):
        await wait_ready(data)
        async with connect_client(data) as client:
            assert replicas_of((await client.admin("GET", "/models/m"))[1]) == [before]
            await report_request(client)
            os.kill(before["pid"], signal.SIGKILL)
            await client.poll_until(
                "/models/m", lambda found: {each["runtime_id"] for each in replicas_of(found)} - {before["runtime_id"]}
            )
            await eventually(
                lambda: len(RunDirectory(data / "run").calls("bind:m")) == 2, "another one has the version"
            )
    assert len(RunDirectory(data / "run").calls("bind:m")) == 2


@pytest.mark.deep
async def test_killed_push_loses_no_acknowledged_version(data: Path) -> None:
    """Versions are pushed until SIGKILL. All acknowledged versions are there after a restart."""
    acknowledged: list[str] = []
    with control_plane_process(data) as process:
        await wait_ready(data)
        async with connect_client(data) as client:
            for number in range(10_000):
                version = f"{number:064x}"
                body = encode(msgspec.structs.replace(registration(), version=version))
                if number == 25:
                    asyncio.get_running_loop().call_later(0.05, process.kill)
                try:
                    status, _ = await client.request("POST", "/internal/v1/versions", body)
                except aiohttp.ClientError:
                    break
                assert status == 201
                acknowledged.append(version)
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with control_plane_process(data):
        await wait_ready(data)
        async with connect_client(data) as client:
            _, model = await client.admin("GET", "/models/m")
    found = {version["version"] for version in model["versions"]}
    assert len(acknowledged) >= 25
    assert set(acknowledged) <= found
    assert len(found) <= len(acknowledged) + 1


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        pytest.param("KELVIN_DATA", "", "is required", id="no data directory"),
        pytest.param("KELVIN_STANDBYS", "-1", "must be 0 or more", id="a negative number of standbys"),
        pytest.param("KELVIN_STANDBY_TARGET", "1", "must be 0.9999 or less", id="a target of certainty"),
        pytest.param("KELVIN_STANDBY_SHARE", "-0.1", "must be 0 or more", id="a negative share"),
        pytest.param("KELVIN_STANDBY_BYTES", "0", "must be 1048576 or more", id="no memory for standbys"),
        pytest.param("KELVIN_DEVICE_SLOTS", "0", "must be 1 or more", id="no device"),
        pytest.param("KELVIN_THREADS", "two", "must be a whole number", id="not a number"),
        pytest.param("KELVIN_KV_BYTES", "1", "must be 67108864 or more", id="no memory"),
        pytest.param("KELVIN_SCALE_DOWN_S", "inf", "must be finite", id="infinite"),
    ],
)
def test_bad_settings_are_refused_with_the_value(name: str, value: str, rule: str) -> None:
    """The error names the variable, the value and the rule."""
    with pytest.raises(ValueError, match=f"{name}={value}: {rule}"):
        load({"KELVIN_DATA": "/somewhere", name: value})
