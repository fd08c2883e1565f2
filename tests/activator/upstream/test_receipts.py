"""Receipts to replicas: one call at a time, only the last receipt of each request, and no delay by a lost replica."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from activator.upstream import replica_sessions
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.http1_client import Client
from activator.upstream.replica_sessions import ReceiptSender, ReplicaSession
from kelvin.contracts.accounting.usage import Receipt
from kelvin.ipc.connector import SocketConnector
from tests.activator.replica import FakeReplica, ReceivedRequest, chunk
from tests.activator.world import CHAT, world


def _receipt(name: str, tokens: int, *, recorded: bool = False) -> Receipt:
    return Receipt(request_id=name, completion_tokens=tokens, recorded=recorded)


async def test_pending_receipts_share_the_next_call(tmp_path: Path) -> None:
    """The first receipt is sent at once. Of the others only the last of each request is sent."""

    replica, background_tasks = FakeReplica(), BackgroundTasks()
    await replica.start(tmp_path, "a")
    with contextlib.closing(Client(SocketConnector(str(tmp_path / "rt-a.sock")))) as http:
        receipt_sender = ReceiptSender(http, background_tasks)
        receipt_sender.queue_receipt(_receipt("x", 1))
        await asyncio.sleep(0)
        receipt_sender.queue_receipt(_receipt("x", 2))
        receipt_sender.queue_receipt(_receipt("y", 7))
        receipt_sender.queue_receipt(_receipt("x", 3, recorded=True))
        await replica.until(lambda r: len(r.acknowledged) == 3)
        await background_tasks.close()
    assert replica.acknowledged == [1, 3, 7]
    assert replica.recorded == ["x"]
    await replica.stop()


async def test_delivery_receipts_are_sent_at_once_records_batched(tmp_path: Path) -> None:
    """Many records are sent in one call after the linger time. A delivery receipt or a close ends the wait."""

    replica, background_tasks = FakeReplica(), BackgroundTasks()
    await replica.start(tmp_path, "a")
    with contextlib.closing(Client(SocketConnector(str(tmp_path / "rt-a.sock")))) as http:
        quick, slow = (
            ReceiptSender(http, background_tasks, linger_s=0.0),
            ReceiptSender(http, background_tasks, linger_s=60.0),
        )
        quick.queue_receipt(_receipt("q", 1, recorded=True))
        await replica.until(lambda r: r.recorded == ["q"])
        for name in "abc":
            slow.queue_receipt(_receipt(name, 1, recorded=True))
        await asyncio.sleep(0)
        assert replica.recorded == ["q"]
        slow.queue_receipt(_receipt("d", 2))
        await replica.until(lambda r: len(r.acknowledged) == 5)
        assert replica.recorded == ["q", "a", "b", "c"]
        slow.queue_receipt(_receipt("e", 1, recorded=True))
        await slow.close()
        assert replica.recorded[-1] == "e"
        await background_tasks.close()
    await replica.stop()


async def test_receipts_to_a_lost_replica_are_dropped(tmp_path: Path) -> None:
    """There is no error and no backlog. The replica keeps its account, or its death is recorded."""

    background_tasks = BackgroundTasks()
    with contextlib.closing(Client(SocketConnector(str(tmp_path / "rt-a.sock")))) as http:
        receipt_sender = ReceiptSender(http, background_tasks)
        for name in "abc":
            receipt_sender.queue_receipt(_receipt(name, 1))
        await background_tasks.close()
    assert repr(receipt_sender) == "<ReceiptSender due=0>"
    receipt_sender.queue_receipt(_receipt("late", 1))  # its session is closed
    await background_tasks.close()


async def test_end_of_a_stream_is_acknowledged_before_its_record(tmp_path: Path) -> None:
    """Delivered tokens are charged even if the activator dies now. Afterwards the replica may forget them."""

    async def script(call: ReceivedRequest) -> None:
        for tokens in range(1, 71):
            await call.data(chunk("x"), tokens)
        await call.end(70)

    async with world(tmp_path) as here:
        replica = await here.replica("a", script)
        assert (await here.post(body=CHAT | {"stream": True})).status == 200
        await replica.until(lambda r: r.recorded == [r.calls[0].request_id])
        assert replica.acknowledged[-1] == 70
        assert replica.calls[0].headers["x-kelvin-source"].startswith("activator-")
        (record,) = await here.control.wait_for_records(1)
        assert json.dumps(record.completion_tokens) == "70"


async def test_retired_session_closes_although_its_replica_is_deaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pending receipt call may take longer than the background task that closes the session."""
    monkeypatch.setattr(replica_sessions, "RECEIPT_TIMEOUT_S", 0.2)
    replica, background_tasks = FakeReplica(), BackgroundTasks()
    replica.ignores_receipts = True
    await replica.start(tmp_path, "a")
    session = ReplicaSession(SocketConnector(str(tmp_path / "rt-a.sock")), background_tasks)
    session.receipt_sender.queue_receipt(_receipt("x", 1))
    await background_tasks.start(session.retire(), 0.05)
    with pytest.raises(ConnectionAbortedError):
        await session.http.request("GET", "/")
    await background_tasks.close()
    await replica.stop()
