"""`kelvin database copy` from outside: an installation goes on in a PostgreSQL with the keys and the bill it had."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.control import KeyRow, LifetimeBatch, Principal, RequestBatch, Scope
from contracts.wire import encode
from kelvin.supervisor.lock import data_lock
from service.principal import HEADER
from tests.controlplane.builders import registration
from tests.controlplane.door import knocking, program
from tests.controlplane.ground import Run, fake_zygote
from tests.controlplane.postgres_server import PostgresServer
from tests.controlplane.test_internal_api import feed
from tests.controlplane.test_program import ready
from tests.controlplane.usage_records import MONTH, lifetime_record, request_record
from tests.kelvin.test_recovery import kelvin

READER = {HEADER: encode(Principal(key_id="k", tenant="acme", scopes=(Scope.ADMIN,))).decode()}


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A data directory with a zygote."""
    where = tmp_path / "data"
    with fake_zygote(Run(where / "run")):
        yield where


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """Of this test's own."""
    with PostgresServer() as made:
        yield made


async def used(data: Path) -> None:
    """A tenant with a key of its own and a bill, and a model."""
    await ready(data)
    async with knocking(data) as door:
        assert (await door.admin("POST", "/tenants", {"tenant": "acme"}))[0] == 201
        assert (await door.admin("POST", "/keys?tenant=acme", {"name": "a", "scopes": ["admin"]}))[0] == 201
        assert (await door.ask("POST", "/internal/v1/versions", encode(registration())))[0] == 201
        records = RequestBatch(records=tuple(request_record(number) for number in range(1, 6)))
        assert (await door.ask("POST", "/internal/v1/usage/requests", encode(records)))[0] == 204
        lived = LifetimeBatch(records=(lifetime_record(1, requests=5),))
        assert (await door.ask("POST", "/internal/v1/usage/lifetimes", encode(lived)))[0] == 204


async def seen(data: Path) -> tuple[Any, list[KeyRow]]:
    """The bill, and the keys as activators hear of them."""
    await ready(data)
    async with knocking(data) as door, feed(door) as reader:
        keys = sorted((await reader.line()).keys, key=lambda row: row.key_id)
        status, bill = await door.ask("GET", f"/admin/v1/billing/report?month={MONTH}", headers=READER)
        assert status == 200
        return bill, keys


def test_an_installation_moves(data: Path, postgres: PostgresServer) -> None:
    """Refused while it runs, and where the other one isn't empty; the control: before, and in a new database, it
    works, and what is told of it there is what was told of it here.
    """
    place = postgres.database(migrated=False)
    words = ("database", "copy", "--to", place.url, "--data", str(data))

    def ends(process: Any) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        (data / "run" / "control.sock").unlink(missing_ok=True)

    with program(data) as process:
        asyncio.run(used(data))
        before = asyncio.run(seen(data))
        code, said = kelvin(*words)
        assert (code, "a control plane runs in" in said) == (1, True), said
        ends(process)
    assert before[0]["total_micros"] > 0
    assert len(before[1]) == 3
    with data_lock(data):
        code, said = kelvin(*words)
        assert (code, "is in use by process" in said) == (1, True), said
    code, said = kelvin(*words, "--json")
    assert code == 0, said
    report = json.loads(said)
    assert report["database"] == place.url
    rows = {each["table"]: each["rows"] for each in report["tables"]}
    assert (rows["tenants"], rows["keys"], rows["ledger_requests"], rows["versions"]) == (2, 3, 5, 1)
    with program(data, database=place.url) as process:
        assert asyncio.run(seen(data)) == before
        ends(process)
    code, said = kelvin(*words)
    assert (code, "is not empty" in said) == (1, True), said
    code, said = kelvin(*words[:3], postgres.database().url, *words[4:])
    assert (code, "each as it was" in said, "KELVIN_DATABASE=postgresql://" in said) == (0, True, True), said


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param("postgresql://kelvin:hunter2@db/kelvin", "must hold no password", id="a password"),
        pytest.param("mysql://db/kelvin", "must be postgresql://", id="another server"),
        pytest.param("postgresql://kelvin@127.0.0.1:9/kelvin", "Connection refused", id="nobody there"),
    ],
)
def test_what_it_is_told_is_looked_at(tmp_path: Path, url: str, says: str) -> None:
    """Nothing was copied, it says why, and shows no password. A directory that is none of ours stays as it is."""
    data = tmp_path / "data"
    code, said = kelvin("database", "copy", "--to", url, "--data", str(data))
    assert (code, "holds no kelvin.db" in said, data.exists()) == (1, True, False)
    data.mkdir()
    (data / "kelvin.db").touch()
    code, said = kelvin("database", "copy", "--to", url, "--data", str(data))
    assert (code, "nothing was copied" in said, says in said) == (1, True, True), said
    assert "hunter2" not in said
