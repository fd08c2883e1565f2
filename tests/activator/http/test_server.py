"""The end of a listener, over real sockets: whoever it let in hears something, also who stood in the porch."""

import asyncio
import json
import ssl

import pytest
from starlette.types import Receive, Scope, Send

from activator.accounting.metrics import RequestMetrics
from activator.app.settings import read_settings
from activator.http.listener_state import ListenerState, RequestStarter
from activator.http.server import serve_plain
from kelvin.ipc.tcp_listener import listen
from kelvin.process.service_lifecycle import Stop
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.eventually import eventually

CALLERS = 30
FOREVER = 30.0
ASKED = b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n"


class Ended:
    """An application that counts who enters. Its answers wait for `release`, and end with the drain's time."""

    def __init__(self) -> None:
        self.begun = 0
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        status = 204
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            status = 503
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Stuck(RequestStarter):
    """Of a loop that is so far behind that nobody's turn comes after the first ones'; until it is freed."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.is_stuck = True

    def _next_tick(self) -> None:
        if self.is_stuck:
            asyncio.get_running_loop().call_later(0.01, self._next_tick)
        else:
            super()._next_tick()


async def drained(first: int, *, frees: bool) -> tuple[list[bytes], int]:
    """What each of the callers heard, and how many entered the application: a drain begins as most of them wait. With
    `frees` their turn comes then, and the answers with it.
    """
    edge = read_settings({"KELVIN_DATA": "/x"}).edge
    request_starter = Stuck(first)
    listener_state = ListenerState(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        edge,
        RequestMetrics(MetricsPage("activator")),
        request_starter=request_starter,
    )
    app, stop, listener = Ended(), Stop(), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with asyncio.timeout(FOREVER):
        serving = asyncio.create_task(serve_plain(app, listener_state, listener, stop, 20 if frees else 1))
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CALLERS)]
        for number, (_, writer) in enumerate(lines):
            writer.write(ASKED % number)
        await eventually(
            lambda: repr(request_starter) == f"<RequestStarter waiting={CALLERS - first}>" and app.begun >= first
        )
        stop.set()
        if frees:
            while listener.fileno() >= 0:  # the drain has begun
                await asyncio.sleep(0.005)
            request_starter.is_stuck = False
            await eventually(lambda: app.begun >= CALLERS)
            app.release.set()
        await serving
        heard = [await reader.read() for reader, _ in lines]
        for _, writer in lines:
            writer.close()
    return heard, app.begun


async def test_drain_serves_requests_that_wait_to_start() -> None:
    """Their turn comes as ever: each of them is served, and its connection ends."""
    heard, begun = await drained(3, frees=True)
    assert [answer[:12] for answer in heard] == [b"HTTP/1.1 204"] * CALLERS
    assert begun == CALLERS


@pytest.mark.parametrize("first", [0, 3])
async def test_drain_timeout_refuses_unstarted_requests(first: int) -> None:
    """With the drain's time those who have begun are ended, and the others refused: a 503 that may be tried again, in
    the API's form, of what nothing has seen.
    """
    heard, begun = await drained(first, frees=False)
    assert [answer[:12] for answer in heard] == [b"HTTP/1.1 503"] * CALLERS
    assert begun == first
    for answer in heard[first:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head
        assert b"\r\nretry-after: 1" in head.lower()
        error = json.loads(body)["error"]
        assert error["code"] == "unavailable"
        assert f"\r\nx-request-id: {error['request_id']}\r\n".encode() in head
