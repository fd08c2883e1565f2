"""One caller of the activator: a connection as the edge makes it, the request, and the response."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message

from activator.http.client_connection import EXTENSION
from activator.http.deadline_timer import DeadlineTimer
from activator.http.exchange import ARRIVAL_KEY, REQUEST_ID_KEY, new_request_id, read_clocks_us
from tests.simulation.activator.fake_control_plane import secret_of

PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    tag: str  # unique, except among requests with the same key and content
    tenant: str
    model: str
    stream: bool
    max_tokens: int
    deadline_s: float
    headers: tuple[tuple[bytes, bytes], ...] = ()
    slow_s: float = 0.0  # until the client has read a piece of the response


class SimulatedClient:
    """A caller. Implements `exchange.Connection`."""

    def __init__(self, request: ClientRequest, record_event: Callable[[str], None]) -> None:
        self.request = request
        self._record_event = record_event
        self.deadline_timer = DeadlineTimer()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.is_complete = False
        self.is_aborted = False
        self.has_left = False
        self.answers = 0  # more than one head and one end is a defect
        self.asked_s = asyncio.get_running_loop().time()
        self.ended_s: float | None = None
        self._gone: Callable[[], None] | None = None
        self._unaccepted = 0
        self._taken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def begin(self, app: ASGIApp) -> None:
        """Send the request. Does nothing if the caller has left before."""
        if self.is_over:
            return
        self.asked_s = asyncio.get_running_loop().time()
        request = self.request
        body = json.dumps({
            "model": request.model, "stream": request.stream, "max_tokens": request.max_tokens, "user": request.tag,
            "messages": [{"role": "user", "content": "hi"}],
        }).encode()  # fmt: skip
        headers = [
            (b"host", b"kelvin.local"), (b"content-length", str(len(body)).encode()),
            (b"authorization", f"Bearer {secret_of(request.tenant)}".encode()),
            (b"x-kelvin-deadline-ms", str(int(request.deadline_s * 1000)).encode()), *request.headers,
        ]  # fmt: skip
        scope: dict[str, object] = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "https", "server": None,
            "client": ("127.0.0.1", 1), "root_path": "", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
            "headers": headers, "extensions": {EXTENSION: self},
            ARRIVAL_KEY: read_clocks_us(), REQUEST_ID_KEY: new_request_id(),
        }  # fmt: skip
        self._body: bytes | None = body
        self.task = asyncio.get_running_loop().create_task(self._run(app, scope), name=f"caller-{request.tag}")

    async def _run(self, app: ASGIApp, scope: dict[str, object]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self.ended_s = self.ended_s or asyncio.get_running_loop().time()
            how = "left" if self.has_left else "cut" if self.is_aborted else "whole" if self.is_complete else "OPEN"
            self._record_event(
                f"{self.request.tag}: {self.status}, {how}, {len(self.body)} bytes of {self.request.model}"
            )

    @property
    def is_over(self) -> bool:
        """Whether nothing more arrives."""
        return self.ended_s is not None

    def leave(self) -> None:
        if not self.is_over:
            self.has_left = True
            if self.task is None:
                self.ended_s = asyncio.get_running_loop().time()
            self._lose()

    def cut(self) -> None:
        """Cut the connection: the process at the other end is dead."""
        if not self.is_over and self.task is not None:
            self.is_aborted = True
            self.ended_s = asyncio.get_running_loop().time()
            self._lose()

    def _lose(self) -> None:
        self._taken.set()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    async def _receive(self) -> Message:
        if self.has_left or self._body is None:
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if self.has_left or self.is_aborted:
            return
        if message["type"] == "http.response.start":
            self.answers += self.status != 0
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.answers += self.is_complete or self.status == 0
        data = message.get("body", b"")
        self.body += data
        self.is_complete = not message.get("more_body", False)
        if self.request.slow_s and data and not self.is_complete:
            self._unaccepted += len(data)
            self._taken.clear()
            asyncio.get_running_loop().call_later(self.request.slow_s, self._accept, len(data))

    def _accept(self, count: int) -> None:
        self._unaccepted -= count
        if not self._unaccepted:
            self._taken.set()

    # Methods of `exchange.Connection`.

    def unaccepted_bytes(self) -> int:
        return self._unaccepted

    def is_all_accepted(self) -> bool:
        return not self._unaccepted and not self.has_left and not self.is_aborted

    async def wait_all_accepted(self) -> bool:
        while self._unaccepted and not self.has_left and not self.is_aborted:
            await self._taken.wait()
        return not self.has_left and not self.is_aborted

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        self._gone = on_disconnect

    def unwatch(self, on_disconnect: Callable[[], None] | None = None) -> None:
        if on_disconnect is None or on_disconnect == self._gone:
            self._gone = None

    def try_read_body(self) -> bytes | None:
        body, self._body = self._body, None
        return body

    def on_body_read(self) -> None:
        return

    def abort(self) -> None:
        self.is_aborted = True
        asyncio.get_running_loop().call_soon(self._lose)
