"""`kelvin restore --database`: an installation moves to PostgreSQL with its keys and bill. Real processes."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kelvin.contracts.serving.control_messages import KeyRow, LifetimeBatch, Principal, RequestBatch, Scope
from kelvin.contracts.wire import encode
from kelvin.ipc.principal import PRINCIPAL_HEADER
from kelvin.supervisor.data_lock import data_lock
from tests.controlplane.builders import registration
from tests.controlplane.control_plane_server import connect_client, control_plane_process, open_feed, wait_ready
from tests.controlplane.machine_fixture import RunDirectory, fake_zygote
from tests.controlplane.postgres_server import PostgresServer
from tests.controlplane.usage_records import MONTH, lifetime_record, request_record
from tests.kelvin.cli.operations.test_recovery_commands import kelvin

READER = {PRINCIPAL_HEADER: encode(Principal(key_id="k", tenant="acme", scopes=(Scope.ADMIN,))).decode()}


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A data directory with a fake zygote."""
    where = tmp_path / "data"
    with fake_zygote(RunDirectory(where / "run")):
        yield where


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test's own."""
    with PostgresServer() as made:
        yield made


async def fill_installation(data: Path) -> None:
    """Create a tenant with a key, a model and a bill."""
    await wait_ready(data)
    async with connect_client(data) as client:
        assert (await client.admin("POST", "/tenants", {"tenant": "acme"}))[0] == 201
        assert (await client.admin("POST", "/keys?tenant=acme", {"name": "a", "scopes": ["admin"]}))[0] == 201
        assert (await client.request("POST", "/internal/v1/versions", encode(registration())))[0] == 201
        records = RequestBatch(records=tuple(request_record(number) for number in range(1, 6)))
        assert (await client.request("POST", "/internal/v1/usage/requests", encode(records)))[0] == 204
        lived = LifetimeBatch(records=(lifetime_record(1, requests=5),))
        assert (await client.request("POST", "/internal/v1/usage/lifetimes", encode(lived)))[0] == 204


async def read_bill_and_keys(data: Path) -> tuple[Any, list[KeyRow]]:
    """Return the bill, and the keys as activators receive them."""
    await wait_ready(data)
    async with connect_client(data) as client, open_feed(client) as reader:
        keys = sorted((await reader.line()).keys, key=lambda row: row.key_id)
        status, bill = await client.request("GET", f"/admin/v1/billing/report?month={MONTH}", headers=READER)
        assert status == 200
        return bill, keys


def test_an_installation_moves(data: Path, postgres: PostgresServer) -> None:
    """A backup is restored to an empty database, where bill and keys are the same. A backup under the lock of a running
    supervisor and a restore to a used database are refused."""
    place, file = postgres.database(migrated=False), data.with_name("stopped.backup")
    words = ("restore", str(file), "--database", place.url)

    def ends(process: Any) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    with control_plane_process(data) as process:
        asyncio.run(fill_installation(data))
        before = asyncio.run(read_bill_and_keys(data))
        ends(process)
    assert before[0]["total_micros"] > 0
    assert len(before[1]) == 3
    with data_lock(data):
        code, output = kelvin("backup", str(file), "--data", str(data))
        assert (code, "is in use by process" in output, file.exists()) == (1, True, False), output
    code, output = kelvin("backup", str(file), "--data", str(data))
    assert code == 0, output
    code, output = kelvin(*words, "--json")
    assert code == 0, output
    report = json.loads(output)
    assert (report["database"], report["keys"], len(report["versions"])) == (place.url, 3, 1)
    with control_plane_process(data, database=place.url) as process:
        assert asyncio.run(read_bill_and_keys(data)) == before
        ends(process)
    code, output = kelvin(*words)
    assert (code, "is not empty" in output) == (1, True), output
    code, output = kelvin(*words[:3], postgres.database().url, database=place.url)
    assert (code, "every row" in output, "KELVIN_DATABASE=postgresql://" in output) == (0, True, True), output


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        pytest.param("postgresql://kelvin:hunter2@db/kelvin", "must hold no password", id="a password"),
        pytest.param("mysql://db/kelvin", "must be postgresql://", id="another server"),
        pytest.param("postgresql://kelvin@127.0.0.1:9/kelvin", "Connection refused", id="an unreachable server"),
    ],
)
def test_refused_restore_shows_no_password(tmp_path: Path, url: str, reason: str) -> None:
    """The error has the reason, says that nothing was restored, and shows no password."""
    (tmp_path / "made.backup").touch()
    code, output = kelvin("restore", str(tmp_path / "made.backup"), "--database", url)
    assert (code, "nothing was restored" in output, reason in output) == (1, True, True), output
    assert "hunter2" not in output


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--database", "new.db", "--check"), id="a check"),
        pytest.param(("--database", "new.db", "--replace"), id="replace a database"),
        pytest.param(("--password-file", __file__), id="a password file without a database"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Contradictory options are wrong usage, and no file is made."""
    (tmp_path / "made.backup").touch()
    assert kelvin("restore", str(tmp_path / "made.backup"), *words, "--data", str(tmp_path / "data"))[0] == 2
    assert {each.name for each in tmp_path.iterdir()} == {"made.backup"}


def test_missing_database_is_not_backed_up(tmp_path: Path) -> None:
    """A backup without a database is refused and makes no directory. An empty `kelvin.db` is refused too."""
    data, file = tmp_path / "data", tmp_path / "made.backup"
    code, output = kelvin("backup", str(file), "--data", str(data))
    assert (code, "holds no kelvin.db" in output, data.exists()) == (1, True, False), output
    data.mkdir()
    (data / "kelvin.db").touch()
    code, output = kelvin("backup", str(file), "--data", str(data), database="postgresql://kelvin@db/kelvin")
    assert (code, "pg_dump" in output, "KELVIN_DATABASE" in output) == (1, True, True), output
    (data / "url").touch()
    code, output = kelvin("backup", str(file), "--data", str(data))
    assert (code, "no backup was made" in output, "kelvin.db is empty" in output) == (1, True, True), output
    assert not file.exists()
