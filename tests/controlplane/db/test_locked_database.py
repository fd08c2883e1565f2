"""While another process locks the database, known models serve and wake, and writes are refused."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from controlplane.db import database as store
from kelvin.contracts.serving.control_messages import RequestBatch
from kelvin.contracts.wire import encode
from tests.controlplane.builders import key, stats
from tests.controlplane.control_plane_server import push, running_control_plane, wait_for_state
from tests.controlplane.usage_records import request_record

BUSY_MS = 50
BATCH = encode(RequestBatch(records=(request_record(1),)))


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Lock the database like a writer that does not finish."""
    with closing(sqlite3.connect(data / "kelvin.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_locked_database_wakes_models_and_refuses_records(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version at zero starts. Records are refused as retryable and are stored once afterwards; a change is refused,
    too. Negative control: after the lock, records are stored.
    """
    monkeypatch.setattr(store, "sqlite_engine", partial(store.sqlite_engine, busy_ms=BUSY_MS))
    async with running_control_plane(data) as client:
        await push(client)
        assert (await client.admin("PUT", "/models/m/scale", {"grace_s": 1}))[0] == 200
        with locked(data):
            stat = msgspec.json.encode(stats(key()))
            assert (await client.request("POST", "/internal/v1/stats", stat))[0] == 204
            await wait_for_state(client, "ready")
            status, problem = await client.request("POST", "/internal/v1/usage/requests", BATCH)
            assert (status, problem["code"], problem["retryable"]) == (503, "unavailable", True)
            status, problem = await client.admin("PUT", "/models/m/scale", {"grace_s": 2})
            assert (status, problem["code"]) == (503, "unavailable")
        for _ in range(2):
            assert (await client.request("POST", "/internal/v1/usage/requests", BATCH))[0] == 204
        assert (await wait_for_state(client, "ready"))["scale"]["grace_s"] == 1
    with closing(sqlite3.connect(data / "kelvin.db")) as database:
        assert database.execute("SELECT count(*) FROM ledger_requests").fetchone() == (1,)
