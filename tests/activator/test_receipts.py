"""Receipts: one call at a time, the last word of each request, and nothing is held up by a replica that is gone."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from activator import sessions
from activator.errands import Errands
from activator.sessions import Desk, Session
from activator.upstream_http import Client
from contracts.usage import Receipt
from service.way import SocketWay
from tests.activator.replica import Call, FakeReplica, chunk
from tests.activator.world import CHAT, world


def _receipt(name: str, tokens: int, *, recorded: bool = False) -> Receipt:
    return Receipt(request_id=name, completion_tokens=tokens, recorded=recorded)


async def test_what_is_said_meanwhile_goes_with_the_next_call(tmp_path: Path) -> None:
    """The first goes at once; of the others only the last word of each request."""

    replica, errands = FakeReplica(), Errands()
    await replica.start(tmp_path, "a")
    with contextlib.closing(Client(SocketWay(str(tmp_path / "rt-a.sock")))) as http:
        desk = Desk(http, errands)
        desk.tell(_receipt("x", 1))
        await asyncio.sleep(0)
        desk.tell(_receipt("x", 2))
        desk.tell(_receipt("y", 7))
        desk.tell(_receipt("x", 3, recorded=True))
        await replica.until(lambda r: len(r.acknowledged) == 3)
        await errands.close()
    assert replica.acknowledged == [1, 3, 7]
    assert replica.recorded == ["x"]
    await replica.stop()


async def test_what_is_recorded_waits_for_company_and_what_was_delivered_does_not(tmp_path: Path) -> None:
    """Many records are one call, once the moment is over; a delivery ends the wait, and so does the desk's end."""

    replica, errands = FakeReplica(), Errands()
    await replica.start(tmp_path, "a")
    with contextlib.closing(Client(SocketWay(str(tmp_path / "rt-a.sock")))) as http:
        quick, slow = Desk(http, errands, linger_s=0.0), Desk(http, errands, linger_s=60.0)
        quick.tell(_receipt("q", 1, recorded=True))
        await replica.until(lambda r: r.recorded == ["q"])
        for name in "abc":
            slow.tell(_receipt(name, 1, recorded=True))
        await asyncio.sleep(0)
        assert replica.recorded == ["q"]
        slow.tell(_receipt("d", 2))
        await replica.until(lambda r: len(r.acknowledged) == 5)
        assert replica.recorded == ["q", "a", "b", "c"]
        slow.tell(_receipt("e", 1, recorded=True))
        await slow.close()
        assert replica.recorded[-1] == "e"
        await errands.close()
    await replica.stop()


async def test_a_replica_that_is_gone_is_told_nothing(tmp_path: Path) -> None:
    """No error, no backlog: it keeps the account, or its death is recorded."""

    errands = Errands()
    with contextlib.closing(Client(SocketWay(str(tmp_path / "rt-a.sock")))) as http:
        desk = Desk(http, errands)
        for name in "abc":
            desk.tell(_receipt(name, 1))
        await errands.close()
    assert repr(desk) == "<Desk due=0>"
    desk.tell(_receipt("late", 1))  # its session is closed
    await errands.close()


async def test_the_end_of_a_stream_is_acknowledged_before_its_record_is_durable(tmp_path: Path) -> None:
    """Tokens that the client has are charged even if this process dies now; then the replica may forget them."""

    async def script(call: Call) -> None:
        for tokens in range(1, 71):
            await call.data(chunk("x"), tokens)
        await call.end(70)

    async with world(tmp_path) as here:
        replica = await here.replica("a", script)
        assert (await here.post(body=CHAT | {"stream": True})).status == 200
        await replica.until(lambda r: r.recorded == [r.calls[0].request_id])
        assert replica.acknowledged[-1] == 70
        assert replica.calls[0].headers["x-kelvin-source"].startswith("activator-")
        (record,) = await here.control.until_records(1)
        assert json.dumps(record.completion_tokens) == "70"


async def test_retired_session_closes_although_its_replica_is_deaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that tells it something may take longer than the errand that closes the session."""
    monkeypatch.setattr(sessions, "TOLD_S", 0.2)
    replica, errands = FakeReplica(), Errands()
    replica.deaf = True
    await replica.start(tmp_path, "a")
    session = Session(SocketWay(str(tmp_path / "rt-a.sock")), errands)
    session.desk.tell(_receipt("x", 1))
    await errands.start(session.retire(), 0.05)
    with pytest.raises(ConnectionAbortedError):
        await session.http.send("GET", "/")
    await errands.close()
    await replica.stop()
