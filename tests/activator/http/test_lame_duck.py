"""A restart of the activator under load: clients on kept-alive connections get answers, and every end of a connection
was announced.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kelvin.ipc.tcp_listener import listen
from tests.activator.http.keep_alive_clients import KeepAliveClients
from tests.activator.world import CHAT, http, world

CLIENTS = 16
POST = http(json.dumps(CHAT).encode())
GET = POST.partition(b"\r\n")[2].partition(b"Content-Length")[0]
GET = b"GET /v1/models HTTP/1.1\r\n" + GET + b"\r\n"


async def _run_load(tmp_path: Path, number: signal.Signals, rounds: int) -> list[str]:
    listener = listen("127.0.0.1", 0)
    try:
        async with world(tmp_path, listener=listener, lame_duck_s=4) as here:
            await here.replica("a", max_streams=64)

            async def change() -> None:
                for _ in range(rounds):
                    old = await here.start_successor()
                    old.send_signal(number)
                    async with asyncio.timeout(60):
                        assert await old.wait() == 0

            load = KeepAliveClients(here.raw, [POST, GET])
            await load.run_during(CLIENTS, change)
            return load.failures
    finally:
        listener.close()


@pytest.mark.deep
async def test_no_request_fails_during_a_hot_restart(tmp_path: Path) -> None:
    """16 kept-alive connections: each response announces the end of its connection, or the connection stays open."""
    assert await _run_load(tmp_path, signal.SIGUSR1, 1) == []


@pytest.mark.deep
async def test_no_request_fails_over_many_hot_restarts(tmp_path: Path) -> None:
    """Four restarts in a row."""
    assert await _run_load(tmp_path, signal.SIGUSR1, 4) == []


@pytest.mark.deep
async def test_control_requests_fail_without_lame_duck(tmp_path: Path) -> None:
    """Negative control: an activator stopped by SIGTERM cuts idle connections, and the same load sees failures."""
    assert await _run_load(tmp_path, signal.SIGTERM, 2)


async def test_a_connection_that_stays_idle_is_ended_in_its_time(tmp_path: Path) -> None:
    """The old activator does not wait for a client that sends no further request."""

    async with world(tmp_path, lame_duck_s=1) as here:
        reader, writer = await here.raw(GET)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        here.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
            assert await here.process.wait() == 0
        writer.transport.abort()


async def test_invalid_listener_fd_is_refused(tmp_path: Path) -> None:
    """The error names the setting."""

    with (tmp_path / "file").open("wb") as file:
        environment = os.environ | {"KELVIN_DATA": str(tmp_path / "d"), "KELVIN_LISTENER_FD": str(file.fileno())}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "activator", env=environment, stderr=asyncio.subprocess.PIPE,
            pass_fds=(file.fileno(),),
        )  # fmt: skip
        _, said = await process.communicate()
        assert process.returncode == 2
        assert b"KELVIN_LISTENER_FD" in said
