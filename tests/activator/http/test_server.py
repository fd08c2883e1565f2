"""Shutdown of a listener over real sockets: every accepted request gets a response, even one that has not started."""

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
REQUEST = b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n"


class HeldApplication:
    """An application that counts its requests. Answers wait for `release`, or end with 503 after the drain's time."""

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


class StuckStarter(RequestStarter):
    """A starter whose loop is so slow that nothing starts after the first iteration, until `is_stuck` is cleared."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.is_stuck = True

    def _begin_tick(self) -> None:
        if self.is_stuck:
            asyncio.get_running_loop().call_later(0.01, self._begin_tick)
        else:
            super()._begin_tick()


async def drain(first: int, *, frees: bool) -> tuple[list[bytes], int]:
    """Drain while most clients wait to start. Return each client's response and how many requests started. With `frees`
    the waiting ones start during the drain.
    """
    edge = read_settings({"KELVIN_DATA": "/x"}).connections
    request_starter = StuckStarter(first)
    listener_state = ListenerState(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        edge,
        RequestMetrics(MetricsPage("activator")),
        request_starter=request_starter,
    )
    app, stop, listener = HeldApplication(), Stop(), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with asyncio.timeout(FOREVER):
        serving = asyncio.create_task(serve_plain(app, listener_state, listener, stop, 20 if frees else 1))
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CALLERS)]
        for number, (_, writer) in enumerate(lines):
            writer.write(REQUEST % number)
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
        responses = [await reader.read() for reader, _ in lines]
        for _, writer in lines:
            writer.close()
    return responses, app.begun


async def test_drain_serves_requests_that_wait_to_start() -> None:
    """Every waiting request starts and is served, and its connection closes."""
    responses, begun = await drain(3, frees=True)
    assert [answer[:12] for answer in responses] == [b"HTTP/1.1 204"] * CALLERS
    assert begun == CALLERS


@pytest.mark.parametrize("first", [0, 3])
async def test_drain_timeout_refuses_unstarted_requests(first: int) -> None:
    """When the drain's time is over, running requests are ended and waiting ones refused. The refusal is a retryable
    503 in the API's format.
    """
    responses, begun = await drain(first, frees=False)
    assert [answer[:12] for answer in responses] == [b"HTTP/1.1 503"] * CALLERS
    assert begun == first
    for answer in responses[first:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head
        assert b"\r\nretry-after: 1" in head.lower()
        error = json.loads(body)["error"]
        assert error["code"] == "unavailable"
        assert f"\r\nx-request-id: {error['request_id']}\r\n".encode() in head
