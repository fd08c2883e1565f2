"""PostgreSQL is killed under a running control plane and comes back. Nothing is lost or restarted. Real processes."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from controlplane.db.postgres_url import PostgresUrl
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.wire import encode
from kelvin.spool import Spool
from kelvin.spool.shipper import Shipper
from tests.controlplane.builders import key, stats
from tests.controlplane.control_plane_server import (
    ADMIN,
    ControlPlaneClient,
    connect_client,
    control_plane_process,
    open_feed,
    push,
    wait_for_state,
    wait_ready,
)
from tests.controlplane.postgres_server import PostgresServer, database_name
from tests.controlplane.usage_records import request_record
from tests.eventually import eventually

SOURCE = "activator-1"


def shipping(client: ControlPlaneClient, spool: Spool) -> Shipper:
    """Return a shipper that repeats each batch until it is accepted, as an activator's does."""

    async def post(records: Sequence[bytes]) -> None:
        batch = b'{"records":[' + b",".join(records) + b"]}"
        status, _ = await client.request("POST", "/internal/v1/usage/requests", batch)
        if status != 204:
            raise Refused(Unavailable("the control plane"))

    return Shipper(spool, post, max_backoff_s=0.2)


async def served(spool: Spool, *numbers: int) -> None:
    """Append the records of finished requests to the spool."""
    for number in numbers:
        await spool.append(lambda sequence, number=number: encode(request_record(number, sequence=sequence)))  # type: ignore[misc]


async def refused(client: ControlPlaneClient, method: str, path: str, body: object) -> None:
    """Check that the call is refused as retryable for a second."""
    async with client.session.request(method, f"http://control/admin/v1{path}", json=body, headers=ADMIN) as answer:
        problem = await answer.json()
        assert (answer.status, problem["code"], problem["retryable"]) == (503, "unavailable", True)
        assert answer.headers["retry-after"] == "1"
        assert "kelvin@" not in str(problem)


async def test_control_plane_survives_a_killed_postgres(
    postgres: PostgresServer, place: PostgresUrl, data: Path
) -> None:
    """A model at zero starts, the feed stays connected, changes are refused, and records wait in their spool.
    Afterwards the same process stores each record once. Control: before the kill, each is accepted.
    """
    with control_plane_process(data, database=place.url) as process:
        await wait_ready(data)
        async with connect_client(data) as client, open_feed(client) as reader:
            await push(client)
            assert (await client.admin("PUT", "/models/m/scale", {"grace_s": 1}))[0] == 200
            with closing(Spool.open(data / "spool", SOURCE)) as spool:
                async with shipping(client, spool) as shipper:
                    await served(spool, 1, 2)
                    await eventually(lambda: shipper.backlog == 0, "records are posted")
                    status, problem = await client.request("GET", "/internal/v1/backup")
                    assert (status, problem["code"], "pg_dump" in str(problem)) == (409, "conflict", True)
                    postgres.kill()
                    await served(spool, 3, 4)
                    assert (await client.request("POST", "/internal/v1/stats", msgspec.json.encode(stats(key()))))[
                        0
                    ] == 204
                    await wait_for_state(client, "ready")
                    await refused(client, "PUT", "/models/m/scale", {"grace_s": 2})
                    await refused(client, "POST", "/tenants", {"tenant": "acme"})
                    await eventually(lambda: shipper.failures > 0, "a post is refused")
                    assert shipper.backlog == 2
                    postgres.start()
                    await eventually(lambda: shipper.backlog == 0, "records are posted")
            assert (await client.admin("PUT", "/models/m/scale", {"grace_s": 3}))[0] == 200
            assert (await client.admin("GET", "/models/m"))[1]["scale"]["grace_s"] == 3
            while not any(row.model == "m" for row in (await reader.line()).models):
                pass  # the connection lasted all the time
        assert process.poll() is None
        database = database_name(place)
        found = postgres.ask("SELECT request_id FROM ledger_requests ORDER BY request_id", database)
        assert [request_id for (request_id,) in found] == ["req-1", "req-2", "req-3", "req-4"]
        assert postgres.ask("SELECT first, last FROM ledger_received", database) == [(1, 4)]
        assert postgres.ask("SELECT sum(requests) FROM ledger_request_totals", database) == [(4,)]


async def test_next_control_plane_takes_over_the_database(
    postgres: PostgresServer, place: PostgresUrl, data: Path
) -> None:
    """A killed control plane leaves no lock, and all its acknowledged data is there."""
    with control_plane_process(data, database=place.url):
        await wait_ready(data)
        async with connect_client(data) as client:
            await push(client)
    (data / "run" / "control.sock").unlink()
    with control_plane_process(data, database=place.url):
        await wait_ready(data)
        async with connect_client(data) as client:
            assert (await client.admin("GET", "/models/m"))[0] == 200


async def test_failover_that_loses_a_key(postgres: PostgresServer, place: PostgresUrl, data: Path) -> None:
    """The control plane ends with a log message. The next one publishes no key that could not be revoked."""
    log = data.parent / "controlplane.log"
    with control_plane_process(data, database=place.url) as process:
        await wait_ready(data)
        async with connect_client(data) as client:
            postgres.keep_copy()
            while (made := await client.admin("POST", "/keys", {"name": "lost", "scopes": ["infer"]}))[0] == 503:
                pass  # its session was cut
            assert made[0] == 201
            assert "lost" in str(await client.admin("GET", "/keys"))
            postgres.fail_over()
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert "the database has lost what it had committed" in log.read_text()
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with control_plane_process(data, database=place.url):
        await wait_ready(data)
        async with connect_client(data) as client, open_feed(client) as reader:
            known = [row.key_id for row in (await reader.line()).keys]
            _, listed = await client.admin("GET", "/keys")
            assert "lost" not in str(listed)
            assert len(known) == 2  # the keys of every installation


async def test_control_plane_waits_for_postgres(postgres: PostgresServer, place: PostgresUrl, data: Path) -> None:
    """It serves once the server is there. SIGTERM ends it while it waits."""
    postgres.kill()
    log = data.parent / "controlplane.log"
    with control_plane_process(data, database=place.url) as process:
        await eventually(lambda: "the database can't be opened" in log.read_text(), "the log says so")
        process.terminate()
        assert process.wait(60) == 0
    with control_plane_process(data, database=place.url):
        await eventually(lambda: log.read_text().count("the database can't be opened") == 2, "the log says so")
        postgres.start()
        await wait_ready(data)
