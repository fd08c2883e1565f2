"""How many modules of the activator serve a completion: who follows a request has to read them all."""

import json
from pathlib import Path

import pytest

from tests.activator.world import CHAT, http, world
from tests.eventually import eventually

MOST = 50
CALLS = 10  # what runs beside a request, runs beside few of them


@pytest.mark.anyio
async def test_completion_takes_few_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the accepted connection to the last byte of the answer, TLS included."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("KELVIN_TRACE", str(trace))
    rows = []
    async with world(tmp_path, program="tests.activator.tracing") as here:
        await here.replica("r1")
        for _ in range(CALLS):
            trace.write_text("")
            reader, writer = await here.raw()
            writer.write(http(json.dumps(CHAT).encode(), extra="Connection: close\r\n"))
            assert b" 200 " in await reader.read()
            writer.close()
            await eventually(lambda: trace.read_text().endswith("\n"))
            rows += [json.loads(line) for line in trace.read_text().splitlines()]
    fewest = min(([module for module in row if module.startswith("activator/")] for row in rows), key=len)
    assert {
        "activator/http/transports.py",
        "activator/queue/throttler.py",
        "activator/upstream/replica_requests.py",
        "activator/accounting/usage_records.py",
    } <= set(fewest)
    assert len(fewest) <= MOST, fewest
