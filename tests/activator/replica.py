"""A fake replica: frames over a Unix socket. It imitates runtime/api/inference_api.py and runtime/api/delivery.py."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from kelvin.contracts.accounting.usage import Receipts
from kelvin.contracts.errors import Failure, Unavailable
from kelvin.contracts.problem import headers_of, openai_error, to_wire
from kelvin.contracts.serving.stream_frames import (
    CONTENT_TYPE,
    CREDIT_HEADER,
    ENCODED_TOKENS_HEADER,
    WANTS_HEADER,
    Counts,
    Frame,
    FrameKind,
    NoCredit,
    StreamEnd,
    encode_frame,
    failed_frame,
)
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import Cancelled
from kelvin.contracts.wire import decode, encode
from runtime.lifecycle.credit_policy import Credits
from tests.stub_server import StubServer

Script = Callable[["ReceivedRequest"], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
END = encode(StreamEnd(finish_reason="stop", spans=(StageSpan(Stage.TOKENIZED, 100), StageSpan(Stage.PREFILLED, 200))))


def chunk(text: str, model: str = "m") -> bytes:
    """Return an SSE event in OpenAI's format."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def whole(text: str, model: str = "m", *, chat: bool = True) -> bytes:
    """Return a whole completion."""
    choice: dict[str, object] = {"index": 0, "finish_reason": "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    kind = "chat.completion" if chat else "text_completion"
    return json.dumps(
        {"id": "x", "object": kind, "created": 1, "model": model, "choices": [choice], "usage": usage}
    ).encode()


class ReceivedRequest:
    """One request at the fake replica, and what its script can do with it."""

    def __init__(self, replica: "FakeReplica", request: web.Request, body: bytes) -> None:
        self.replica = replica
        self.request = request
        self.body = body
        self.wanted = json.loads(body)
        self.request_id = request.headers["x-kelvin-request-id"]
        self.headers = dict(request.headers)
        self.answer: web.StreamResponse | None = None
        self.refusal: web.Response | None = None
        self.is_cut = False
        self.tokens = 0  # of the last frame
        self.work: asyncio.Task[None] | None = None
        self.is_deleted = False

    async def open(self) -> None:
        """Send status 200 and the headers, once."""
        if self.answer is None:
            self.answer = web.StreamResponse(headers={"content-type": CONTENT_TYPE, **self.replica.credit_of(self)})
            await self.answer.prepare(self.request)
            await self.replica.changed()

    async def write(self, kind: FrameKind, payload: bytes = b"", tokens: int = 0, prompt: int = 3) -> None:
        """Send a frame with cumulative counts."""
        await self.open()
        assert self.answer is not None
        self.tokens = tokens
        await self.answer.write(encode_frame(Frame(kind, Counts(prompt, 1, tokens, tokens * 10), payload)))

    async def data(self, payload: bytes, tokens: int) -> None:
        """Send bytes for the client."""
        await self.write(FrameKind.DATA, payload, tokens)

    async def end(self, tokens: int) -> None:
        """Send the frame that ends a complete answer."""
        await self.write(FrameKind.END, END, tokens)

    async def fail(self, failure: Failure, tokens: int = 0) -> None:
        """Send the frame that ends an answer with a failure."""
        await self.open()
        assert self.answer is not None
        await self.answer.write(failed_frame(to_wire(failure), Counts(3, 1, tokens, 0)))

    def refuse(self, failure: Failure, encoded_tokens: int = 0) -> None:
        """Refuse before any compute, after `encoded_tokens` of the prompt were encoded."""
        headers = headers_of(failure) | ({ENCODED_TOKENS_HEADER: str(encoded_tokens)} if encoded_tokens else {})
        self.refusal = web.Response(status=failure.status, body=openai_error(failure, self.request_id), headers=headers)

    async def run(self, script: "Script") -> None:
        """Run the script. If the activator deletes the request, end the answer as a runtime does."""
        self.work = asyncio.ensure_future(script(self))
        try:
            await self.work
        except asyncio.CancelledError:
            if not self.is_deleted:
                raise
            if self.answer is None and not self.tokens:
                self.refuse(Cancelled())
            else:
                await self.fail(Cancelled(), self.tokens)
        finally:
            self.work.cancel()

    def delete(self) -> None:
        """End the script, because the activator deleted the request."""
        if self.work is not None and not self.work.done():
            self.is_deleted = True
            self.work.cancel()

    def cut(self) -> None:
        """Break the connection."""
        assert self.request.transport is not None
        self.is_cut = True
        self.request.transport.abort()


async def hello(call: ReceivedRequest) -> None:
    """Answer with two tokens, streamed or whole."""
    if call.wanted.get("stream"):
        await call.data(chunk("hel"), 1)
        await call.data(chunk("lo"), 2)
        await call.data(DONE, 2)
    else:
        await call.write(FrameKind.HEARTBEAT, tokens=1)
        await call.data(whole("hello", chat="messages" in call.wanted), 2)
    await call.end(2)


async def unfiltered(call: ReceivedRequest) -> None:
    """Answer like `hello`, as a version whose filters are down and whose policy lets text pass."""
    await call.data(whole("hello") if not call.wanted.get("stream") else chunk("hello") + DONE, 2)
    await call.write(FrameKind.END, encode(StreamEnd(finish_reason="stop", unfiltered=True)), 2)


async def silent(call: ReceivedRequest) -> None:
    """Send nothing until the activator deletes the request."""
    await asyncio.Event().wait()


async def endless(call: ReceivedRequest) -> None:
    """Stream without end."""
    tokens = 0
    while True:
        tokens += 1
        await call.data(chunk("x"), tokens)
        await asyncio.sleep(0.01)


async def cut(call: ReceivedRequest) -> None:
    """Break the connection before the first byte of the answer."""
    call.cut()


async def lost(call: ReceivedRequest) -> None:
    """Break the connection within the answer."""
    await call.open()
    call.cut()


def refuses(failure: Failure, encoded_tokens: int = 0) -> Script:
    """Return a script that refuses before any compute."""

    async def script(call: ReceivedRequest) -> None:
        call.refuse(failure, encoded_tokens)

    return script


decline: Final = refuses(Unavailable("this replica"))  # like a replica that drains


class Held:
    """Answer with `then` once released. Until then run `first`, which must not end the answer."""

    def __init__(self, then: Script = hello, first: Script | None = None) -> None:
        self._then = then
        self._first = first
        self._released = asyncio.Event()

    async def __call__(self, call: ReceivedRequest) -> None:
        if self._first is not None:
            await self._first(call)
        await self._released.wait()
        await self._then(call)

    def release(self) -> None:
        """Let all requests continue, including later ones."""
        self._released.set()


def halves() -> Held:
    """Answer like `hello`. The first token of a stream is sent at once, the rest when released."""

    async def first(call: ReceivedRequest) -> None:
        if call.wanted.get("stream"):
            await call.data(chunk("hel"), 1)

    async def rest(call: ReceivedRequest) -> None:
        if not call.wanted.get("stream"):
            await hello(call)
            return
        await call.data(chunk("lo"), 2)
        await call.data(DONE, 2)
        await call.end(2)

    return Held(rest, first)


class FakeReplica:
    """A replica that answers by its script. It records cancellations, receipts, and the most concurrent requests."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.credits: Credits | None = None  # how it divides its streams; None: an older build without credit
        self.refused = 0  # requests refused because it was full
        self.calls: list[ReceivedRequest] = []
        self.deleted: list[str] = []
        self.deleted_before_close: list[str] = []
        self.answered_elsewhere: list[str] = []  # deleted requests that another replica answered
        self.acknowledged: list[int] = []
        self.recorded: list[str] = []
        self.ignores_receipts = False  # accept receipts but never answer
        self.running = 0
        self.max_running = 0
        self.events = asyncio.Condition()
        self._listening: StubServer | None = None
        self._transports: set[asyncio.Transport] = set()

    async def start(self, run: Path, name: str) -> None:
        """Listen as `rt-NAME.sock`."""
        self._listening = StubServer(self.application())
        await self._listening.start(run / f"rt-{name}.sock")

    def application(self) -> web.Application:
        """Return its routes."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_delete("/v1/requests/{id}", self._delete)
        app.router.add_post("/v1/receipts", self._receipts)
        return app

    async def stop(self) -> None:
        """Stop cleanly."""
        if self._listening is not None:
            await self._listening.stop()
            self._listening = None

    async def kill(self) -> None:
        """Break every connection and stop listening, as after SIGKILL."""
        for transport in list(self._transports):
            transport.abort()
        await self.stop()

    async def until(self, claim: Callable[["FakeReplica"], bool]) -> None:
        """Wait until the claim holds."""
        async with asyncio.timeout(30), self.events:
            await self.events.wait_for(lambda: claim(self))

    async def changed(self) -> None:
        """Let `until` check again."""
        async with self.events:
            self.events.notify_all()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.credits is None:
            return await self._answer(request)
        source, wants = request.headers["x-kelvin-source"], int(request.headers[WANTS_HEADER])
        if not self.credits.try_enter(source, wants, time.monotonic()):
            self.refused += 1
            await self.changed()
            full = NoCredit(self.credits.streams, self.credits.credit_of(source, time.monotonic()))
            return web.Response(
                status=full.status, body=openai_error(full, request.headers["x-kelvin-request-id"]),
                headers={CREDIT_HEADER: str(full.credit)},
            )  # fmt: skip
        try:
            return await self._answer(request)
        finally:
            self.credits.leave(source)

    def credit_of(self, call: ReceivedRequest) -> dict[str, str]:
        """Return the credit header of an answer."""
        if self.credits is None:
            return {}
        return {CREDIT_HEADER: str(self.credits.credit_of(call.headers["x-kelvin-source"], time.monotonic()))}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call = ReceivedRequest(self, request, await request.read())
        transport = request.transport
        assert transport is not None
        self._transports.add(transport)
        self.calls.append(call)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await self.changed()
        try:
            await call.run(self.script)
        finally:
            self.running -= 1
            if not transport.is_closing():
                self._transports.discard(transport)
            await asyncio.shield(self.changed())
        if call.refusal is not None:
            return call.refusal
        assert call.answer is not None
        return call.answer

    async def _delete(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        self.deleted.append(request_id)
        if "x-kelvin-elsewhere" in request.headers:
            self.answered_elsewhere.append(request_id)
        still_open = [call for call in self.calls if call.request_id == request_id and call.request.transport]
        if still_open and not still_open[0].request.transport.is_closing():  # type: ignore[union-attr]
            self.deleted_before_close.append(request_id)
        for call in still_open:
            call.delete()
        await self.changed()
        return web.Response(status=204)

    async def _receipts(self, request: web.Request) -> web.Response:
        if self.ignores_receipts:
            await asyncio.Event().wait()
        for receipt in decode(await request.read(), Receipts).receipts:
            self.acknowledged.append(receipt.completion_tokens)
            if receipt.recorded:
                self.recorded.append(receipt.request_id)
        await self.changed()
        return web.Response(status=204)
