"""The front door is changed while clients ask on kept-alive connections, and while it is dead: none of them sees it."""

import asyncio
import json
import os
import signal
import ssl
import sys

import pytest

from coldstart_bench.installation import Installation
from tests.activator.kept_alive import Connected, Load
from tests.activator.world import http
from tests.e2e.calls import complete
from tests.e2e.processes import command, services, supervisor

pytestmark = pytest.mark.deep


async def _restart(kelvin: Installation) -> tuple[int | None, str]:
    words = ("-m", "kelvin.main", "restart", "activator", "--data", str(kelvin.data))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, wrong = await process.communicate()
    return process.returncode, (said + wrong).decode()


def test_three_restarts_under_load(kelvin: Installation) -> None:
    """`kelvin restart activator` three times, 16 clients: each time another process, and not one failure."""
    complete(kelvin, "llama", "w1", max_tokens=1)
    key = (kelvin.data / "default.key").read_text().strip()
    post = http(json.dumps({"model": "llama", "prompt": "w1", "max_tokens": 2}).encode(), "/v1/completions", key)
    get = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    tls = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    seen = [services(kelvin)["activator"].pid]

    async def connect() -> Connected:
        return await asyncio.open_connection("127.0.0.1", kelvin.port, ssl=tls, server_hostname="localhost")

    async def change() -> None:
        for _ in range(3):
            status, said = await _restart(kelvin)
            assert status == 0, said
            seen.append(services(kelvin)["activator"].pid)

    load = Load(connect, [get, post, get, get])
    asyncio.run(load.during(16, change))
    assert load.failures == []
    assert len(set(seen)) == 4


def test_an_activator_that_dies_refuses_nobody(kelvin: Installation) -> None:
    """Who connects while there is none waits in the supervisor's socket, and is answered."""
    first = services(kelvin)["activator"]
    os.kill(first.pid, signal.SIGKILL)
    assert complete(kelvin, "llama", "w1", max_tokens=1).status == 200
    assert services(kelvin)["activator"].pid != first.pid


def test_two_orders_at_once(kelvin: Installation) -> None:
    """Both return, whatever each took for the old door, and one activator is there in the end."""

    async def both() -> list[tuple[int | None, str]]:
        return list(await asyncio.gather(_restart(kelvin), _restart(kelvin)))

    assert [status for status, _ in asyncio.run(both())] == [0, 0]
    kelvin.wait(
        lambda: [command(p)[-1:] for p in supervisor(kelvin).children()].count(["activator"]) == 1, "one is left"
    )
