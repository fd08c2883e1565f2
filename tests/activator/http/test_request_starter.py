"""RequestStarter: of requests that arrive together a few start per loop iteration, so running ones are not delayed."""

import asyncio
import ssl
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from activator.accounting.metrics import RequestMetrics
from activator.app.settings import read_settings
from activator.http.exchange import ARRIVAL_KEY, now_us
from activator.http.http1_protocol import Http1Protocol
from activator.http.listener_state import STARTS_PER_TICK, ListenerState, RequestStarter
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.http.memory_connections import MemorySocket

ARRIVING = 20


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("it must not start")


class FakeRequest:
    """A pending request that reports when it starts or is refused."""

    def __init__(
        self, record: Callable[[str], None], name: str, source: str | None = None, credential: bytes = b""
    ) -> None:
        self.source = source
        self.has_left = False
        self.looks = 0
        self._record, self._name, self._credential = record, name, credential

    def credential(self) -> bytes:
        self.looks += 1
        return self._credential

    def try_begin(self) -> bool:
        if not self.has_left:
            self._record(self._name)
        return not self.has_left

    def refuse(self) -> None:
        self._record(f"no {self._name}")


async def _count_starts(request_starter: RequestStarter) -> list[list[str]]:
    """Let 20 requests arrive at once and one later. Return which started in each loop iteration."""
    rounds: list[list[str]] = [[]]

    def record_start(name: str) -> None:
        rounds[-1].append(name)

    for number in range(ARRIVING):
        request_starter.enter(FakeRequest(record_start, str(number)))
    late = False
    while sum(map(len, rounds)) <= ARRIVING:
        rounds.append([])
        await asyncio.sleep(0)
        if not late:
            late = True
            request_starter.enter(FakeRequest(record_start, str(ARRIVING)))
    return rounds


@pytest.mark.parametrize(("most", "want"), [
    pytest.param(8, [8, 8, 5], id="eight per iteration, a late one last"),
    pytest.param(1000, [ARRIVING, 1], id="control: all at once"),
])  # fmt: skip
async def test_few_requests_start_per_tick(most: int, want: list[int]) -> None:
    """Requests start in order of arrival, none is lost, and the starter is idle afterwards."""

    request_starter = RequestStarter(most)
    for _ in range(3):  # the starter can be used again
        rounds = await _count_starts(request_starter)
        assert [len(each) for each in rounds] == want
        assert [number for each in rounds for number in each] == [str(number) for number in range(ARRIVING + 1)]
        for _ in range(2):
            await asyncio.sleep(0)
    assert repr(request_starter) == "<RequestStarter waiting=0>"


async def test_requests_start_round_robin_by_credential() -> None:
    """Twenty requests of one credential arrive before three of another. They take turns, each in its own order."""

    request_starter, begun = RequestStarter(2), list[str]()
    for number in range(20):
        request_starter.enter(FakeRequest(begun.append, f"a{number}", credential=b"a"))
    for number in range(3):
        request_starter.enter(FakeRequest(begun.append, f"b{number}", credential=b"b"))
    while len(begun) < 23:
        await asyncio.sleep(0)
    assert begun[:9] == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "b2", "a5"]
    assert begun[9:] == [f"a{number}" for number in range(6, 20)]


async def test_requests_start_round_robin_by_address_first() -> None:
    """A client that uses a new credential for each request gets no more turns than one with a single credential."""

    request_starter, begun = RequestStarter(1), list[str]()
    for number in range(6):
        request_starter.enter(FakeRequest(begun.append, f"many{number}", "203.0.113.1", b"%d" % (number % 3)))
    for number in range(3):
        request_starter.enter(FakeRequest(begun.append, f"one{number}", "203.0.113.2", b"one"))
    request_starter.enter(FakeRequest(begun.append, "ours"))
    while len(begun) < 10:
        await asyncio.sleep(0)
    assert begun == ["many0", "many1", "one0", "ours", "many2", "one1", "many3", "one2", "many4", "many5"]


async def test_unqueued_request_is_not_inspected() -> None:
    """The credential is read only for a request that has to wait, and only once."""

    request_starter, begun = RequestStarter(2), list[str]()
    callers = [FakeRequest(begun.append, str(number)) for number in range(5)]
    for caller in callers:
        request_starter.enter(caller)
    while len(begun) < 5:
        await asyncio.sleep(0)
    assert [caller.looks for caller in callers] == [0, 0, 1, 1, 1]


async def test_disconnected_request_uses_no_start() -> None:
    """Eight of twelve waiting requests disconnect. The other four start in the next two iterations, two in each."""

    request_starter, begun = RequestStarter(2), list[str]()
    callers = [FakeRequest(begun.append, str(number)) for number in range(14)]
    for caller in callers:
        request_starter.enter(caller)
    for caller in callers[2:10]:
        caller.has_left = True
    rounds = [list(begun)]
    for _ in range(4):
        await asyncio.sleep(0)
        rounds.append(begun[sum(map(len, rounds)) :])
    assert rounds == [["0", "1"], ["10", "11"], ["12", "13"], [], []]
    assert repr(request_starter) == "<RequestStarter waiting=0>"


async def test_closed_starter_refuses_requests() -> None:
    """Waiting requests are refused at once, and so are later ones."""

    request_starter, events = RequestStarter(2), list[str]()
    for number in range(4):
        request_starter.enter(FakeRequest(events.append, str(number)))
    request_starter.close()
    request_starter.enter(FakeRequest(events.append, "late"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert events == ["0", "1", "no 2", "no 3", "no late"]
    assert repr(request_starter) == "<RequestStarter waiting=0 closed>"


@pytest.mark.parametrize(("most", "want", "gone"), [
    pytest.param(STARTS_PER_TICK, STARTS_PER_TICK, 1, id="the real limit"),
    pytest.param(1000, ARRIVING, 0, id="control: all at once"),
])  # fmt: skip
async def test_response_is_not_delayed_by_a_burst_of_requests(most: int, want: int, gone: int) -> None:
    """Twenty requests are read at once. A callback that is due then runs after eight starts. All are answered except
    the one that disconnected. Their arrival time is when they were read.
    """
    begun: list[str] = []
    arrived_us: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        arrived_us.append(scope[ARRIVAL_KEY][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    edge = read_settings({"KELVIN_DATA": "/x"}).connections
    listener_state = ListenerState(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        edge,
        RequestMetrics(MetricsPage("activator")),
        request_starter=RequestStarter(most),
    )
    config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False, interface="asgi3")
    server, sockets = ServerState(), [MemorySocket() for _ in range(ARRIVING)]
    lines = [Http1Protocol(listener_state, config, server, {}) for _ in sockets]
    for number, (here, socket) in enumerate(zip(lines, sockets, strict=True)):
        here.raw, here.source = socket, None
        here.connection_made(socket)
        here.data_received(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number)
    read_us = now_us()
    lines[-1].connection_lost(None)
    await asyncio.sleep(0)
    assert len(begun) == want
    async with asyncio.timeout(30):
        while len(begun) < ARRIVING - gone or server.tasks:
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
    assert begun == [f"/{number}" for number in range(ARRIVING - gone)]
    assert max(arrived_us) <= read_us
    assert [socket.written[:12] for socket in sockets[:-1]] == [b"HTTP/1.1 204"] * (ARRIVING - 1)
    assert not sockets[-1].written
    for here in lines[:-1]:
        here.connection_lost(None)


async def test_closed_starter_refuses_connected_clients_only() -> None:
    """The first client disconnects while it waits and gets nothing. The second gets 503 on close."""

    edge = read_settings({"KELVIN_DATA": "/x"}).connections
    listener_state = ListenerState(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        edge,
        RequestMetrics(MetricsPage("activator")),
        request_starter=RequestStarter(1),
    )
    config = uvicorn.Config(_never, lifespan="off", log_config=None, proxy_headers=False, interface="asgi3")
    server, sockets = ServerState(), [MemorySocket() for _ in range(2)]
    lines = [Http1Protocol(listener_state, config, server, {}) for _ in sockets]
    listener_state.request_starter.enter(FakeRequest(lambda _: None, "first in this round"))
    for here, socket in zip(lines, sockets, strict=True):
        here.raw, here.source = socket, None
        here.connection_made(socket)
        here.data_received(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
    assert repr(listener_state.request_starter) == "<RequestStarter waiting=2>"
    lines[0].connection_lost(None)
    listener_state.request_starter.close()
    assert not server.tasks
    assert [b'"code":"unavailable","request_id":"req_' in socket.written for socket in sockets] == [False, True]
    assert not sockets[0].written
    assert sockets[1].closing
    lines[1].connection_lost(None)
