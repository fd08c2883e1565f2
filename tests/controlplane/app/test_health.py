"""Health probes are answered from the start of the process to its end. The database is a real PostgreSQL."""

import asyncio
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import free_port
from controlplane.app.app import run
from controlplane.app.health import open_health
from controlplane.db.postgres_url import PostgresUrl
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.peer_settings import PeerSettings
from tests.controlplane.control_plane_server import settings
from tests.controlplane.health_probe import probing
from tests.controlplane.postgres_server import PostgresServer


async def test_waiting_process_is_alive_and_not_ready(
    postgres: PostgresServer, place: PostgresUrl, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is alive throughout and ready once it serves. Its port stays open until its end."""
    port, stop = free_port(), asyncio.Event()
    postgres.kill()
    given = settings(data, database=place.url, health_listen=f"127.0.0.1:{port}")
    async with probing(port) as says, asyncio.timeout(60):
        serving = asyncio.create_task(run(given, stop))
        while (await says("/healthz"))[0] == 0:
            await asyncio.sleep(0)
        while "the database can't be opened" not in caplog.text:
            assert ((await says("/healthz"))[0], (await says("/readyz"))[0]) == (200, 503)
        assert await says("/readyz") == (503, "waits for the database: it can't be reached, the log says why")
        postgres.start()
        while (await says("/readyz"))[0] != 200:
            assert (await says("/healthz"))[0] == 200
        stop.set()
        assert (await says("/readyz"))[0] in (0, 503)
        await serving
        assert await says("/healthz") == (0, "")


async def test_taken_health_port_is_refused_by_setting() -> None:
    place = PeerSettings(health=("127.0.0.1", free_port()))
    async with open_health(place, asyncio.Event()):
        with pytest.raises(BadSetting, match=r"KELVIN_HEALTH_LISTEN=127\.0\.0\.1:\d+: can't be listened on"):
            async with open_health(place, asyncio.Event()):
                pass
