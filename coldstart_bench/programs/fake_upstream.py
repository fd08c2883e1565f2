"""A fake control plane and fake replicas behind a measured activator: one small program on Unix sockets.

Arguments: data directory, and a JSON file with `UpstreamConfig` (`coldstart_bench/harness/activator_testbed.py`). Each
line of JSON on standard input is answered with `port`, a TCP port that answers chats without an activator; `recorded`,
the number of requests with a usage record; and `unrecorded`, the number of chats that the activator got answered but
has not recorded. `{"into": FILE}` also writes `UpstreamReport`.

A whole chat is answered at once, a streamed one token by token. A completion takes as long as `UpstreamConfig` says.
Its text is the lengths of its prompt and answer, so that a client can check that the answer belongs to its request.
"""

import asyncio
import json
import re
import sys
import threading
from pathlib import Path
from typing import Final, cast

import msgspec
import uvloop

from coldstart_bench.harness.activator_testbed import MODEL, UpstreamConfig, UpstreamReport
from coldstart_bench.programs.json_lines import answer_lines
from kelvin.contracts.serving.control_messages import RequestBatch
from kelvin.contracts.serving.stream_frames import CONTENT_TYPE, Counts, Frame, FrameKind, StreamEnd, encode_frame
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import decoder, encode
from kelvin.ipc.socket_directory import SocketDirectory

NOTHING: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
OPEN: Final = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
LAST: Final = b"0\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n"
_REQUEST_ID: Final = re.compile(rb'"request_id":"([^"]+)"')
_ID: Final = b"x-kelvin-request-id: "
_HEAD: Final = OPEN % CONTENT_TYPE.encode()
_END: Final = encode(
    StreamEnd(finish_reason="stop", spans=(StageSpan(Stage.TOKENIZED, 100), StageSpan(Stage.PREFILLED, 200)))
)


class CompletionBody(msgspec.Struct):
    """The fields of a completion request that determine its duration."""

    prompt: str
    max_tokens: int


def chunk(data: bytes) -> bytes:
    """Return a chunk of the chunked transfer coding (RFC 9112, 7.1)."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def frame(kind: FrameKind, payload: bytes, prompt: int = 3, tokens: int = 2) -> bytes:
    """Return a frame as a runtime sends it."""
    return encode_frame(Frame(kind, Counts(prompt, 0, tokens, tokens * 10), payload))


def form(kind: str, choice: dict[str, object], **more: object) -> bytes:
    """Return a response or a stream event in OpenAI's form."""
    head = {"id": "x", "object": kind, "created": 1, "model": MODEL}
    return msgspec.json.encode({**head, "choices": [{"index": 0, **choice}], **more})


def whole(kind: str, choice: dict[str, object], prompt: int = 3, tokens: int = 2) -> bytes:
    """Return a complete response with its usage."""
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return form(kind, {"finish_reason": "stop", **choice}, usage=usage)


CHAT: Final = whole("chat.completion", {"message": {"role": "assistant", "content": "hello"}})
_DELTA: Final[dict[str, object]] = {"delta": {"content": "hello"}, "finish_reason": None}
EVENT: Final = b"data: %s\n\n" % form("chat.completion.chunk", _DELTA)
_FRAMED_CHAT: Final = _HEAD + chunk(frame(FrameKind.DATA, CHAT) + frame(FrameKind.END, _END)) + LAST
_PLAIN_CHAT: Final = PLAIN % (len(CHAT), CHAT)


class UpstreamState:
    """State that all connections share."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.feed = OPEN % b"application/x-ndjson" + chunk(encode(config.feed) + b"\n")
        self.batches: list[bytes] = []
        self.recorded: set[bytes] = set()
        self.chats: set[bytes] = set()  # ids of requests whose complete response the activator got
        self.inside = self.most_inside = self.answered = 0

    def record(self, batch: bytes) -> None:
        """Store a batch of records. A batch that is sent again adds nothing."""
        self.recorded.update(_REQUEST_ID.findall(batch))
        if self.config.keeps_records:
            self.batches.append(batch)

    def report(self) -> UpstreamReport:
        """Return the numbers of answers and records so far."""
        every = (record for batch in self.batches for record in decoder(RequestBatch).decode(batch).records)
        records = {record.request_id: record for record in every}
        return UpstreamReport(self.answered, self.most_inside, tuple(records.values()))


class UpstreamProtocol(asyncio.Protocol):
    """Answers requests by their path, one after another. Bodies have a content-length."""

    def __init__(self, world: UpstreamState, *, framed: bool) -> None:
        self._world = world
        self._framed = framed
        self._unread = b""
        self._next: asyncio.TimerHandle | None = None
        self._is_inside = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no instances of it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()
        self._free_slot()  # the caller disconnected: free its slot

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:end].lower()
            at = head.find(b"content-length:")
            length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._unread) < end + 4 + length:
                return
            body = self._unread[end + 4 : end + 4 + length]
            self._unread = self._unread[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/v1/completions":
            self._begin(decoder(CompletionBody).decode(body))
        elif path.startswith(b"/v1/chat/"):
            if b'"stream": true' in body:
                self._transport.write(_HEAD)
                self._send_token(1, int(json.loads(body)["max_tokens"]), asyncio.get_running_loop().time())
            else:
                if self._framed:
                    self._world.chats.add(head.partition(_ID)[2].partition(b"\r\n")[0])
                self._transport.write(_FRAMED_CHAT if self._framed else _PLAIN_CHAT)
        elif path == b"/internal/v1/feed":
            self._transport.write(self._world.feed)  # the response stays open
        else:
            if path == b"/internal/v1/usage/requests":
                self._world.record(body)
            self._transport.write(NOTHING)

    def _send_token(self, number: int, last: int, at_s: float) -> None:
        """Send the token of this number. The next one is due by the clock, however late this one was."""
        if number == last:
            end = frame(FrameKind.DATA, EVENT + DONE, tokens=number) + frame(FrameKind.END, _END, tokens=number)
            self._transport.write(chunk(end) + LAST)
            return
        self._transport.write(chunk(frame(FrameKind.DATA, EVENT, tokens=number)))
        due_s = at_s + self._world.config.token_s
        self._next = asyncio.get_running_loop().call_at(due_s, self._send_token, number + 1, last, due_s)

    def _begin(self, completion: CompletionBody) -> None:
        """Begin a completion, which occupies a slot for its duration."""
        world, config = self._world, self._world.config
        prompt = len(completion.prompt.split())
        takes_s = config.slot_s + prompt * config.prompt_token_s + completion.max_tokens * config.token_s
        self._is_inside = True
        world.inside += 1
        world.most_inside = max(world.most_inside, world.inside)
        self._next = asyncio.get_running_loop().call_later(takes_s, self._end, prompt, completion.max_tokens)

    def _end(self, prompt: int, tokens: int) -> None:
        self._free_slot()
        self._world.answered += 1
        answer = whole("text_completion", {"text": f"{prompt} {tokens}"}, prompt, tokens)
        frames = frame(FrameKind.DATA, answer, prompt, tokens) + frame(FrameKind.END, _END, prompt, tokens)
        self._transport.write(_HEAD + chunk(frames) + LAST)

    def _free_slot(self) -> None:
        self._world.inside -= self._is_inside
        self._is_inside = False


async def serve(data: Path, config: UpstreamConfig) -> None:
    """Serve until standard input ends."""
    world, loop = UpstreamState(config), asyncio.get_running_loop()
    directory, ended = SocketDirectory(data / "run"), asyncio.Event()
    servers: list[asyncio.Server] = [  # keep references: a collected server stops listening
        await loop.create_unix_server(lambda: UpstreamProtocol(world, framed=True), sock=directory.listen(name))
        for name in ("control.sock", *(replica.address for replica in config.feed.replicas))
    ]
    servers.append(await loop.create_server(lambda: UpstreamProtocol(world, framed=False), "127.0.0.1", 0))
    port = servers[-1].sockets[0].getsockname()[1]

    def answer(into: str | None = None) -> dict[str, int]:
        if into is not None:
            Path(into).write_bytes(msgspec.json.encode(world.report()))
        return {"port": port, "recorded": len(world.recorded), "unrecorded": len(world.chats - world.recorded)}

    def answer_all() -> None:
        answer_lines(answer)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=answer_all, daemon=True).start()
    await ended.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), decoder(UpstreamConfig).decode(Path(sys.argv[2]).read_bytes())))
