"""A pod's reports to the ledger, during its life and at its end: retries, and no lost records."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.errors import Failure, InvalidRequest, Refused, RemoteFailure, Unavailable
from kelvin.contracts.problem import problem_details
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.spool.leftover_recovery import RecoveredSource, recover
from kelvin.spool.shipper import Post
from kelvin.spool.spool import Spool
from kelvin.supervisor import ledger_client as subject
from kelvin.supervisor.ledger_client import LedgerClient, report_running_forever, report_usage_to
from tests.controlplane.usage_records import lifetime_record, request_record
from tests.stub_server import StubServer

INTERVAL_S = 30.0
ALL = {("lifetimes", "rt-1"), ("lifetimes", "rt-2"), ("requests", "rt-1")}  # all records that the tests below send
AWAY = RemoteFailure("unavailable", 503, "the database is not available", remote_retryable=True)


@pytest.mark.parametrize(
    ("failure", "longest_pauses_s"),
    [
        pytest.param(Unavailable("the control plane"), [0.5, 1, 2, 4, 8, 16, 30, 30], id="the control plane is away"),
        pytest.param(AWAY, [0.5, 1, 2, 4, 8, 16, 30, 30], id="its database is away"),
        pytest.param(InvalidRequest("records", "rt-1", "can't be"), [INTERVAL_S] * 8, id="the report is invalid"),
        pytest.param(None, [INTERVAL_S] * 8, id="the control: the report is accepted"),
    ],
)
@pytest.mark.virtual_time
async def test_failed_usage_report_is_retried_with_backoff(
    failure: Failure | None, longest_pauses_s: list[float]
) -> None:
    """A retryable failure is retried with back-off. After others, the next report comes at its regular time."""
    reported_at_s: list[float] = []

    async def post(record: LifetimeRecord) -> None:
        reported_at_s.append(asyncio.get_running_loop().time())
        if failure is not None and len(reported_at_s) <= len(longest_pauses_s):
            raise Refused(failure)

    task = asyncio.create_task(report_running_forever(lambda: lifetime_record(1), post, INTERVAL_S))
    await asyncio.sleep(sum(longest_pauses_s) + 2 * INTERVAL_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    pauses_s = [after - before for before, after in pairwise(reported_at_s)]
    for pause_s, longest_s in zip(pauses_s, [*longest_pauses_s, INTERVAL_S], strict=False):
        assert longest_s / 2 - 0.001 <= pause_s <= longest_s + 0.001
    assert pauses_s[-1] == pytest.approx(INTERVAL_S), "then as ever"


class Ledger:
    """A ledger that refuses the first `refusals` posts, and never responds while it is `stuck`."""

    def __init__(self, refusals: int, *, stuck: bool = False) -> None:
        self.refusals = refusals
        self.stuck = stuck
        self.asked = asyncio.Event()
        self.taken: set[tuple[str, str]] = set()  # a set, because repeated records count once

    async def take(self, request: web.Request) -> web.Response:
        self.asked.set()
        if self.stuck:
            await asyncio.Event().wait()
        self.refusals -= 1
        if self.refusals >= 0:
            return web.Response(body=problem_details(Unavailable("away")), status=503)
        records = (await request.json())["records"]
        self.taken |= {(request.match_info["kind"], record["runtime_id"]) for record in records}
        return web.Response(status=204)


@asynccontextmanager
async def ledger_client(path: Path, ledger: Ledger) -> AsyncIterator[LedgerClient]:
    """Yield a client of `ledger`, with leftover spools of a dead runtime and a dead supervisor in `path`."""
    for source, record in (("runtime-1", request_record(1)), ("supervisor-1", lifetime_record(1))):
        with closing(Spool.open(path / "spool", source)) as left:
            left.append_blocking(lambda sequence, record=record: encode(record))  # type: ignore[misc]
    app = web.Application()
    app.router.add_post("/internal/v1/usage/{kind}", ledger.take)
    listening = StubServer(app)
    with closing(SocketDirectory(path / "run")) as directory:
        await listening.start(path / "run" / "control.sock")
        control = ServiceClient(directory, "control.sock", "the control plane")
        try:
            yield LedgerClient(control, path / "spool")
        finally:
            await control.close()
            await listening.stop()


@pytest.mark.parametrize(
    ("refusals", "stuck"),
    [
        pytest.param(0, False, id="every post is accepted"),
        pytest.param(5, False, id="five posts are refused"),
        pytest.param(0, True, id="a post is stuck as the pod ends"),
    ],
)
async def test_final_flush_lasts_as_long_as_allowed(tmp_path: Path, refusals: int, stuck: bool) -> None:
    """The pod's own record and the leftovers are sent, and the spool is empty when the block ends."""
    ledger = Ledger(refusals, stuck=stuck)

    async with ledger_client(tmp_path, ledger) as client:
        with closing(Spool.open(tmp_path / "spool", "supervisor-2")) as own:
            async with report_usage_to(client, own, lambda: None, INTERVAL_S):
                await ledger.asked.wait()
                await asyncio.to_thread(own.append_blocking, lambda sequence: encode(lifetime_record(2)))
                ledger.stuck = False
    assert ledger.taken == ALL
    assert list((tmp_path / "spool").iterdir()) == []


async def test_usage_reporting_survives_an_unexpected_error(tmp_path: Path) -> None:
    """An exception while a lifetime is read doesn't stop later reports."""
    ledger, errors = Ledger(0), [ValueError("a meter of another build")]

    def running_lifetime() -> LifetimeRecord:
        if errors:
            raise errors.pop()
        return lifetime_record(1)

    async with ledger_client(tmp_path, ledger) as client:
        with closing(Spool.open(tmp_path / "spool", "supervisor-2")) as own:
            async with report_usage_to(client, own, running_lifetime, INTERVAL_S), asyncio.timeout(30):
                while ("lives", "rt-1") not in ledger.taken:
                    await asyncio.sleep(0.01)
    assert errors == []


async def test_pod_ends_if_its_records_are_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its time limit the pod ends and logs it. The records stay for the next recovery."""
    monkeypatch.setattr(subject, "FINAL_FLUSH_S", 0.2)
    away = Ledger(10**6)

    async with ledger_client(tmp_path, away) as client:
        with closing(Spool.open(tmp_path / "spool", "supervisor-2")) as own:
            async with report_usage_to(client, own, lambda: None, INTERVAL_S):
                await asyncio.to_thread(own.append_blocking, lambda sequence: encode(lifetime_record(2)))
        assert away.taken == set()
        assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [
            "the replica's records were not sent: they stay in its spool",
            "the lifetime record was not sent: it stays in the spool",
        ]
        away.refusals = 0
        assert await client.recover() == 0
    assert away.taken == ALL


async def test_recovery_is_retried_after_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers are sent once the disk can be read."""
    ledger, fails = Ledger(0), iter((OSError("a moment"), OSError("another")))

    async def failing(spools: Path, post_for: Callable[[str], Post | None]) -> list[RecoveredSource]:
        if (error := next(fails, None)) is not None:
            raise error
        return await recover(spools, post_for)

    monkeypatch.setattr(subject, "recover", failing)
    monkeypatch.setattr(subject, "RECOVERY_INTERVAL_S", 0.001)

    async with ledger_client(tmp_path, ledger) as client:
        task = asyncio.create_task(client.recover_forever())
        async with asyncio.timeout(60):
            await ledger.asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
