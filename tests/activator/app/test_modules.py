"""A completion runs code of few modules of the activator, so that a reader can follow it."""

import json
from pathlib import Path

import pytest

from tests.activator.world import CHAT, http, world
from tests.eventually import eventually

MOST = 50
CALLS = 10  # background work touches only few of the requests


@pytest.mark.anyio
async def test_completion_takes_few_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the accepted connection to the last byte of the answer, TLS included."""
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
