"""Each ledger check runs in a process of its own. A caller gets the report or its progress; an unclaimed check ends."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from controlplane.db.database import snapshot, sqlite_engine
from controlplane.ledger_check import check_runner as subject
from controlplane.ledger_check.check_program import CheckRequest
from controlplane.ledger_check.check_runner import RUNNING_LIMIT, CheckRunner
from controlplane.ledger_check.ledger_verification import verify_ledger
from kelvin.contracts.accounting.billing_reports import Examining, ReconcileReport, VerifyReport
from kelvin.contracts.errors import Internal, Refused, Unavailable
from kelvin.contracts.problem import from_wire, to_wire
from kelvin.contracts.traffic_errors import Overloaded
from tests.controlplane.billing_fixture import BOOK, enter, good_month
from tests.controlplane.builders import World
from tests.controlplane.usage_records import END_US
from tests.eventually import eventually

# Reports its process id as the number of rows read, and never ends.
SAYS = """
import os, time
print('{"type":"read","rows":%d,"of":9}' % os.getpid(), flush=True)
time.sleep(600)
"""
ENDLESS = (sys.executable, "-c", SAYS)
BROKEN = (sys.executable, "-c", "raise SystemExit(3)")
CUT = (sys.executable, "-c", """print('{"type":"report","answ', end="")""")


def order(kind: str = "verify", tenant: str = "acme", month: str | None = None) -> CheckRequest:
    """Return the request that the route builds."""
    return msgspec.convert(
        {"kind": kind, "tenant": tenant, "month": month, "live": [], "now_us": END_US,
         "book": msgspec.to_builtins(BOOK)}, CheckRequest,
    )  # fmt: skip


@asynccontextmanager
async def examining(path: Path, program: tuple[str, ...] = subject.PROGRAM) -> AsyncIterator[CheckRunner]:
    """Yield a runner over a ledger with a good month."""
    with closing(World(path)) as world:
        enter(world.database.engine, good_month())
        it = CheckRunner(path / "kelvin.db", path / "spool", program)
        try:
            yield it
        finally:
            await it.close()


def is_alive(pid: int) -> bool:
    """Return whether the process exists. It is a child of this process, and reaped as soon as it ends."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def pid_of(it: CheckRunner, what: CheckRequest) -> int:
    """Return the process id of the endless program once it has reported it."""
    found: list[int] = []
    while not found or not found[0]:
        seen = await it.answer(what)
        assert isinstance(seen, Examining)
        found[:] = [seen.rows]
    return found[0]


@pytest.mark.deep
async def test_both_reports_come_from_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal the reports of this process. A caller with a short wait gets the progress and asks again."""
    monkeypatch.setattr(subject, "ANSWER_WAIT_S", 120.0)
    async with examining(tmp_path) as it:
        raw = await it.answer(order())
        assert isinstance(raw, bytes)
        with snapshot(sqlite_engine(tmp_path / "kelvin.db")) as connection:
            assert msgspec.json.decode(raw, type=VerifyReport) == verify_ledger(connection, "acme", None)
        monkeypatch.setattr(subject, "ANSWER_WAIT_S", 0.01)
        polls = 0
        while isinstance(raw := await it.answer(order("reconcile")), Examining):
            polls += 1
        assert polls > 0
        assert msgspec.json.decode(raw, type=ReconcileReport).agrees


async def test_damaged_database_is_refused_as_by_every_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged database is not reported as a failure of the checking process."""
    monkeypatch.setattr(subject, "ANSWER_WAIT_S", 120.0)
    (tmp_path / "kelvin.db").write_bytes(b"no database " * 1000)
    with pytest.raises(Refused) as refused:
        await CheckRunner(tmp_path / "kelvin.db", tmp_path / "spool").answer(order())
    damaged = Unavailable("the database, whose files are damaged,", 60.0)
    assert refused.value.failure == from_wire(to_wire(damaged))


async def test_unclaimed_check_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends. A check that runs when the runner closes ends, too."""
    monkeypatch.setattr(subject, "ANSWER_WAIT_S", 0.05)
    async with examining(tmp_path, ENDLESS) as it:
        monkeypatch.setattr(subject, "UNCLAIMED_LIMIT_S", 60.0)
        left = await pid_of(it, order("reconcile"))
        monkeypatch.setattr(subject, "UNCLAIMED_LIMIT_S", 0.1)
        pid = await pid_of(it, order())
        await eventually(lambda: not is_alive(pid), "it ends")
        assert is_alive(left)
    assert not is_alive(left)


async def test_same_check_is_joined_and_others_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third check of the tenant is refused for a while. Another tenant can still start one."""
    monkeypatch.setattr(subject, "ANSWER_WAIT_S", 0.01)
    async with examining(tmp_path, ENDLESS) as it:
        for month in ("2026-10", "2026-11"):
            assert isinstance(await it.answer(order(month=month)), Examining)
            assert isinstance(await it.answer(order(month=month)), Examining)
        with pytest.raises(Refused) as refused:
            await it.answer(order(month="2026-12"))
        assert refused.value.failure == Overloaded("the queue of ledger checks", RUNNING_LIMIT, 5.0)
        assert isinstance(await it.answer(order(tenant="beta")), Examining)
        with pytest.raises(Refused):
            await it.answer(order(tenant="gamma"))


@pytest.mark.parametrize("program", [BROKEN, CUT], ids=["at once", "in the middle of it"])
async def test_a_process_that_ends_without_a_report_is_a_failure(tmp_path: Path, program: tuple[str, ...]) -> None:
    """The next call starts a new process."""
    async with examining(tmp_path, program) as it:
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                await it.answer(order())
            assert refused.value.failure == Internal()
