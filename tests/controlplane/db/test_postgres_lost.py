"""PostgreSQL is killed below a control plane, a process of its own, and comes back: nothing is lost or restarted."""

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
    feed,
    program,
    push,
    ready,
    wait_for_state,
)
from tests.controlplane.postgres_server import PostgresServer, database_name
from tests.controlplane.usage_records import request_record
from tests.eventually import eventually

SOURCE = "activator-1"


def shipping(door: ControlPlaneClient, spool: Spool) -> Shipper:
    """As an activator hands its records over: again until they are taken."""

    async def post(records: Sequence[bytes]) -> None:
        batch = b'{"records":[' + b",".join(records) + b"]}"
        status, _ = await door.ask("POST", "/internal/v1/usage/requests", batch)
        if status != 204:
            raise Refused(Unavailable("the control plane"))

    return Shipper(spool, post, max_backoff_s=0.2)


async def served(spool: Spool, *numbers: int) -> None:
    """Requests that ended; each record is durable."""
    for number in numbers:
        await spool.append(lambda sequence, number=number: encode(request_record(number, sequence=sequence)))  # type: ignore[misc]


async def refused(door: ControlPlaneClient, method: str, path: str, body: object) -> None:
    """For a second, by the failure that everybody knows."""
    async with door.session.request(method, f"http://control/admin/v1{path}", json=body, headers=ADMIN) as answer:
        problem = await answer.json()
        assert (answer.status, problem["code"], problem["retryable"]) == (503, "unavailable", True)
        assert answer.headers["retry-after"] == "1"
        assert "kelvin@" not in str(problem)


async def test_control_plane_survives_a_killed_postgres(
    postgres: PostgresServer, place: PostgresUrl, data: Path
) -> None:
    """A model at zero wakes by what is known, the feed stands, changes are refused as passing, records wait in their
    spool; then all of it goes on, each record once, in the same process. Control: before, each is taken.
    """
    with program(data, database=place.url) as process:
        await ready(data)
        async with connect_client(data) as door, feed(door) as reader:
            await push(door)
            assert (await door.admin("PUT", "/models/m/scale", {"grace_s": 1}))[0] == 200
            with closing(Spool.open(data / "spool", SOURCE)) as spool:
                async with shipping(door, spool) as shipper:
                    await served(spool, 1, 2)
                    await eventually(lambda: shipper.backlog == 0, "records are posted")
                    status, problem = await door.ask("GET", "/internal/v1/backup")
                    assert (status, problem["code"], "pg_dump" in str(problem)) == (409, "conflict", True)
                    postgres.kill()
                    await served(spool, 3, 4)
                    assert (await door.ask("POST", "/internal/v1/stats", msgspec.json.encode(stats(key()))))[0] == 204
                    await wait_for_state(door, "ready")
                    await refused(door, "PUT", "/models/m/scale", {"grace_s": 2})
                    await refused(door, "POST", "/tenants", {"tenant": "acme"})
                    await eventually(lambda: shipper.failures > 0, "a post is refused")
                    assert shipper.backlog == 2
                    postgres.start()
                    await eventually(lambda: shipper.backlog == 0, "records are posted")
            assert (await door.admin("PUT", "/models/m/scale", {"grace_s": 3}))[0] == 200
            assert (await door.admin("GET", "/models/m"))[1]["scale"]["grace_s"] == 3
            while not any(row.model == "m" for row in (await reader.line()).models):
                pass  # its connection held all the while
        assert process.poll() is None
        database = database_name(place)
        found = postgres.ask("SELECT request_id FROM ledger_requests ORDER BY request_id", database)
        assert [request_id for (request_id,) in found] == ["req-1", "req-2", "req-3", "req-4"]
        assert postgres.ask("SELECT first, last FROM ledger_received", database) == [(1, 4)]
        assert postgres.ask("SELECT sum(requests) FROM ledger_request_totals", database) == [(4,)]


async def test_next_control_plane_takes_over_the_database(
    postgres: PostgresServer, place: PostgresUrl, data: Path
) -> None:
    """Of a control plane that is killed nothing holds the lock, and all that it answered is there."""
    with program(data, database=place.url):
        await ready(data)
        async with connect_client(data) as door:
            await push(door)
    (data / "run" / "control.sock").unlink()
    with program(data, database=place.url):
        await ready(data)
        async with connect_client(data) as door:
            assert (await door.admin("GET", "/models/m"))[0] == 200


async def test_failover_that_loses_a_key(postgres: PostgresServer, place: PostgresUrl, data: Path) -> None:
    """The control plane ends, and says why. The next one tells activators of no key that can't be revoked any more."""
    log = data.parent / "controlplane.log"
    with program(data, database=place.url) as process:
        await ready(data)
        async with connect_client(data) as door:
            postgres.keep_copy()
            while (made := await door.admin("POST", "/keys", {"name": "lost", "scopes": ["infer"]}))[0] == 503:
                pass  # its session was cut
            assert made[0] == 201
            assert "lost" in str(await door.admin("GET", "/keys"))
            postgres.fail_over()
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert "the database has lost what it had committed" in log.read_text()
    (data / "run" / "control.sock").unlink(missing_ok=True)
    with program(data, database=place.url):
        await ready(data)
        async with connect_client(data) as door, feed(door) as reader:
            known = [row.key_id for row in (await reader.line()).keys]
            _, listed = await door.admin("GET", "/keys")
            assert "lost" not in str(listed)
            assert len(known) == 2  # those of every installation


async def test_control_plane_waits_for_postgres(postgres: PostgresServer, place: PostgresUrl, data: Path) -> None:
    """A control plane that finds none waits, and serves once it is there; told to end meanwhile, it ends."""
    postgres.kill()
    log = data.parent / "controlplane.log"
    with program(data, database=place.url) as process:
        await eventually(lambda: "the database can't be opened" in log.read_text(), "it says so")
        process.terminate()
        assert process.wait(60) == 0
    with program(data, database=place.url):
        await eventually(lambda: log.read_text().count("the database can't be opened") == 2, "it says so")
        postgres.start()
        await ready(data)
