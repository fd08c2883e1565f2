"""The end of a response: delivered, recorded durably, then the last byte. The record may also fail."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from activator.accounting.request_account import Account
from activator.accounting.timelines import Timelines
from activator.accounting.usage_records import UsageRecords, ledger_poster
from activator.dependencies import SPOOL
from activator.limits.policy.monthly_budget import TenantSpending
from activator.limits.tenant_budgets import BudgetReservation
from activator.request.client_response import SINGLE_WRITE_BYTES, ClientResponse
from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Principal
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.timeline import Timeline
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.spool import Spool
from kelvin.spool.segment_writer import Make
from tests.activator.exchanges import FakeConnection, exchange
from tests.activator.limits.spending import PRICES
from tests.activator.replica import DONE, chunk
from tests.kelvin.spool.disks import DEADLINE_S, GatedDisk
from tests.kelvin.spool.test_segment_writer import read_all


class CuttableConnection(FakeConnection):
    """A connection that records when it was cut."""

    def __init__(self, said: list[bytes]) -> None:
        super().__init__()
        self.said = said

    def abort(self) -> None:
        self.said.append(b"<cut>")


class SlowSpool(Spool):
    """A spool whose records are durable once the gate is open."""

    def __init__(self) -> None:
        self.source, self._committed = "a-1", 6
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def append(self, make: Make) -> int:
        self.reached.set()
        await self.gate.wait()
        return 7


class RecordingUsage(UsageRecords):
    """Usage records that note when an account is settled, between the sent pieces."""

    def __init__(self, said: list[bytes], failure: Failure | None) -> None:
        self.said = said
        self.failure = failure

    async def settle(self, account: Account, failure: Failure | None = None, status: int | None = None) -> None:
        if account.is_settled:
            return
        account.is_settled = True
        self.said.append(b"<record of %d tokens>" % account.delivered_tokens)
        if self.failure is not None:
            raise Refused(self.failure)


def _account(*, stream: bool) -> Account:
    principal = Principal(key_id="k", tenant="t", scopes=())
    return Account("req_1", principal, "m", stream, 0, Timeline(0), counts=Counts(3, 0, 2, 0))


@pytest.mark.parametrize(
    ("runtime", "waits"),
    [
        pytest.param(None, False, id="no replica received it"),
        pytest.param("rt", True, id="control: a replica received it"),
    ],
)
async def test_refused_request_does_not_wait_for_its_record(tmp_path: Path, runtime: str | None, waits: bool) -> None:
    """The record of a free request is written later. One that may be charged is durable before the end is sent."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    account = _account(stream=False)
    account.runtime_id = runtime

    said: list[bytes] = []
    usage = UsageRecords(spool, Timelines(), on_end=lambda *_: None)
    answer = ClientResponse(exchange(said), account, usage, 1.0, lambda: "x")
    failing = asyncio.create_task(answer.fail(Overloaded("the queue", 1, 1.0)))
    if waits:
        await asyncio.to_thread(disk.reached.wait, DEADLINE_S)
        assert not said
        disk.gate.set()
    await failing
    assert said[0] == b"<503>"
    assert disk.gate.is_set() is waits
    assert account.is_settled
    disk.gate.set()
    spool.close()
    (record,) = read_all(tmp_path / "a-1")
    assert b'"outcome":"overloaded"' in record


async def _answer(pieces: Iterable[bytes], *, stream: bool, failure: Failure | None = None) -> list[bytes]:
    said: list[bytes] = []
    account = _account(stream=stream)
    answer = ClientResponse(exchange(said), account, RecordingUsage(said, failure), 1.0, lambda: "x")
    for count, piece in enumerate(pieces, 1):
        await answer.relay_data(piece, count)
    try:
        await answer.complete()
    except Refused as refused:
        await answer.fail(refused.failure)
    return said


@pytest.mark.parametrize(
    ("stream", "pieces", "want"),
    [
        pytest.param(True, [b"data: 1\n\n", b"data: 2\n\n" + DONE],
                     [b"<200>", b"data: 1\n\n", b"data: 2\n\n", b"<record of 2 tokens>", DONE],
                     id="with [DONE] at the end"),
        pytest.param(True, [b"data: 1\n\n", DONE], [b"<200>", b"data: 1\n\n", b"<record of 2 tokens>", DONE],
                     id="[DONE] on its own"),
        pytest.param(True, [b"data: 1\n\n"], [b"<200>", b"data: 1\n\n", b"<record of 1 tokens>", b""],
                     id="without [DONE]"),
        pytest.param(False, [b'{"a":1}'], [b"<record of 2 tokens>", b"<200>", b'{"a":1}'], id="a whole answer"),
        pytest.param(False, [b"[" + b" " * SINGLE_WRITE_BYTES, b"]"],
                     [b"<200>", b"[" + b" " * SINGLE_WRITE_BYTES, b"<record of 2 tokens>", b"]"],
                     id="a whole answer that is large"),
    ],
)  # fmt: skip
async def test_record_is_durable_before_the_last_byte(stream: bool, pieces: list[bytes], want: list[bytes]) -> None:
    """All but the last piece is sent, then the record is written, then the rest is sent."""
    said = await _answer(pieces, stream=stream)
    if stream:
        timeline, said[-1] = said[-1][: said[-1].index(b"\n\n") + 2], said[-1][said[-1].index(b"\n\n") + 2 :]
        assert timeline.startswith(b": timeline {")
    assert said == want


async def test_unrecorded_response_does_not_end_normally() -> None:
    """A stream gets an error event instead of [DONE]. A whole answer is refused, or cut if its length was promised."""
    failure = Unavailable("the usage spool")
    said = await _answer([chunk("x"), DONE], stream=True, failure=failure)
    assert b"event: error" in said[-1]
    assert DONE not in b"".join(said)
    said = await _answer([b'{"a":1}'], stream=False, failure=failure)
    assert said[:2] == [b"<record of 2 tokens>", b"<503>"]
    assert b'"a"' not in b"".join(said)
    said = await _answer([b"[" + b" " * SINGLE_WRITE_BYTES, b"]"], stream=False, failure=failure)
    assert said == [b"<200>", b"[" + b" " * SINGLE_WRITE_BYTES, b"<record of 2 tokens>"]


@pytest.mark.parametrize(
    ("stream", "opens", "want"),
    [
        pytest.param(False, True, [b"<200>", b'{"a":1}'], id="a whole answer"),
        pytest.param(True, True, [b"<200>", b"data: 1\n\n", DONE], id="a stream"),
        pytest.param(False, False, [b"<cut>"], id="a whole answer, and the disk hangs"),
        pytest.param(True, False, [b"<200>", b"data: 1\n\n", b"<cut>"], id="a stream, and the disk hangs"),
    ],
)
@pytest.mark.virtual_time
async def test_deadline_does_not_cut_a_response_being_recorded(
    monkeypatch: pytest.MonkeyPatch, stream: bool, opens: bool, want: list[bytes]
) -> None:
    """The answer exists and is charged, so it is sent once its record is durable, within the disk's time. After that
    the connection is cut, so the caller isn't told to retry and pay again. The budget counts it once either way.
    """
    said: list[bytes] = []
    account = _account(stream=stream)
    row = SpendingRow(tenant="t", month="2026-11", ends_at_us=1 << 60, spent_micros=0, prices=PRICES, seen={})
    spent = TenantSpending("a-1", row)

    monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
    assert spent.try_hold(100, 50, 0)
    account.budget_reservation = BudgetReservation(spent, PRICES, 50)
    spool, asked = SlowSpool(), exchange(said, CuttableConnection(said))
    answer = ClientResponse(asked, account, UsageRecords(spool, Timelines(), on_end=lambda *_: None), 60.0, lambda: "x")

    async def complete() -> None:
        with asked.cancel_on_disconnect(0.1):
            await answer.relay_data(b"data: 1\n\n" + DONE if stream else b'{"a":1}', 2)
            await answer.complete()

    task = asyncio.create_task(complete())
    await spool.reached.wait()
    await asyncio.sleep(SPOOL.timeout_s - 1.0)
    assert not task.done()
    assert spent.held_micros == 50
    if opens:
        spool.gate.set()
        await task
    else:
        with pytest.raises(TimeoutError):
            await task
        await answer.fail(DeadlineExceeded(0.1, "x"))
    if stream and opens:
        said[-1] = said[-1][said[-1].index(b"\n\n") + 2 :]
    assert said == want
    assert account.is_recorded is opens
    assert (spent.held_micros, spent.spent_micros(0)) == (0, 3 + 2)


class FullSpool(Spool):
    """A spool that refuses every record."""

    def __init__(self) -> None:
        self.source, self._committed = "a-1", 6

    async def append(self, make: Make) -> int:
        raise Refused(Unavailable("the usage spool"))


@pytest.mark.parametrize(
    ("stream", "want"),
    [
        pytest.param(False, ("unavailable", 503, 0), id="a whole answer"),
        pytest.param(True, ("unavailable", 200, 2), id="a stream"),
    ],
)
async def test_unrecorded_response_counts_as_its_failure(stream: bool, want: tuple[str, int, int]) -> None:
    outcomes: list[tuple[str, int, int]] = []

    def ended(account: Account, failure: Failure | None, outcome: str, status: int) -> None:
        outcomes.append((outcome, status, account.delivered_tokens))

    account = _account(stream=stream)
    account.runtime_id = "rt"
    answer = ClientResponse(
        exchange([]), account, UsageRecords(FullSpool(), Timelines(), on_end=ended), 1.0, lambda: "x"
    )
    await answer.relay_data(b"data: 1\n\n" + DONE if stream else b'{"a":1}', 2)
    with pytest.raises(Refused) as refused:
        await answer.complete()
    await answer.fail(refused.value.failure)
    assert outcomes == [want]
    assert not account.is_recorded


async def test_a_ledger_that_dies_within_its_answer_is_unavailable(tmp_path: Path) -> None:
    """The records are sent again. This is not a defect of the activator."""
    directory = SocketDirectory(tmp_path)

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{")
        writer.close()

    async with await asyncio.start_unix_server(die, sock=directory.listen("control.sock")):
        control = ServiceClient(directory, "control.sock", "the control plane")
        with pytest.raises(Refused) as refused:
            await ledger_poster(control)([b"{}"])
        await control.close()
    assert refused.value.failure == Unavailable("the control plane")
    directory.close()
