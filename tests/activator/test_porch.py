"""Requests that come at once begin a few in each round of the loop; what is under way goes on between them."""

import asyncio
import ssl

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from activator.edge_http import HttpProtocol
from activator.exchange import ARRIVED, now_us
from activator.gate import Gate
from activator.meters import Meters
from activator.porch import ROUND, Porch
from activator.settings import read_settings
from telemetry.policy.instruments import Page
from tests.activator.test_edge_h2_fuzz import Socket

CAME = 20


async def _begun(porch: Porch) -> list[list[int]]:
    """Of twenty that come at once, and one that comes a round later: who begins in which round."""
    rounds: list[list[int]] = [[]]
    for number in range(CAME):
        porch.enter(lambda number=number: rounds[-1].append(number))  # type: ignore[misc]
    late = False
    while sum(map(len, rounds)) <= CAME:
        rounds.append([])
        await asyncio.sleep(0)
        if not late:
            late = True
            porch.enter(lambda: rounds[-1].append(CAME))
    return rounds


@pytest.mark.parametrize(("most", "want"), [
    pytest.param(8, [8, 8, 5], id="eight in a round, and who comes late behind those that wait"),
    pytest.param(1000, [CAME, 1], id="the control: all at once"),
])  # fmt: skip
def test_a_few_begin_in_each_round(most: int, want: list[int]) -> None:
    """In the order in which they came; none is lost, and nothing goes on when all have begun."""

    async def scenario() -> None:
        porch = Porch(most)
        for _ in range(3):  # it is as it was
            rounds = await _begun(porch)
            assert [len(each) for each in rounds] == want
            assert [number for each in rounds for number in each] == list(range(CAME + 1))
            for _ in range(2):
                await asyncio.sleep(0)
        assert repr(porch) == "<Porch waiting=0>"

    asyncio.run(scenario())


def test_credentials_take_turns() -> None:
    """Whose twenty came first is not ahead of another's three; each one's begin in their order."""

    async def scenario() -> None:
        porch, begun = Porch(2), list[str]()
        for number in range(20):
            porch.enter(lambda number=number: begun.append(f"a{number}"), b"a")  # type: ignore[misc]
        for number in range(3):
            porch.enter(lambda number=number: begun.append(f"b{number}"), b"b")  # type: ignore[misc]
        while len(begun) < 23:
            await asyncio.sleep(0)
        assert begun[:9] == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "b2", "a5"]
        assert begun[9:] == [f"a{number}" for number in range(6, 20)]

    asyncio.run(scenario())


@pytest.mark.parametrize(("most", "want"), [
    pytest.param(ROUND, ROUND, id="as it is"),
    pytest.param(1000, CAME, id="the control: all at once"),
])  # fmt: skip
def test_an_answer_does_not_stand_behind_all_who_come(most: int, want: int) -> None:
    """Twenty connections' requests were read in one go: what is due then is done when no more than eight have begun.
    All are answered, also one whose client has gone meanwhile, without a word; their time runs from when they came.
    """
    begun: list[str] = []
    came_us: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        came_us.append(scope[ARRIVED][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario() -> None:
        edge = read_settings({"KELVIN_DATA": "/x"}).edge
        gate = Gate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), edge, Meters(Page("activator")), porch=Porch(most))
        config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False, interface="asgi3")
        server, sockets = ServerState(), [Socket() for _ in range(CAME)]
        lines = [HttpProtocol(gate, config, server, {}) for _ in sockets]
        for number, (here, socket) in enumerate(zip(lines, sockets, strict=True)):
            here.raw, here.source = socket, None
            here.connection_made(socket)
            here.data_received(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number)
        read_us = now_us()
        lines[-1].connection_lost(None)
        await asyncio.sleep(0)
        assert len(begun) == want
        async with asyncio.timeout(30):
            while len(begun) < CAME or server.tasks:
                await asyncio.sleep(0)
        assert begun == [f"/{number}" for number in range(CAME)]
        assert max(came_us) <= read_us
        assert [socket.written[:12] for socket in sockets[:-1]] == [b"HTTP/1.1 204"] * (CAME - 1)
        assert not sockets[-1].written
        for here in lines[:-1]:
            here.connection_lost(None)

    asyncio.run(scenario())
