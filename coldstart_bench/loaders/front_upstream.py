"""What is behind an activator that is measured, as lean as it can be: the control plane's socket and one replica's.

Arguments: data directory, key, and how many tokens a second a stream has. Says `ready`; each line of JSON on stdin is
answered with the TCP port where the same answers are to be had without an activator, how many whole answers an
activator was given, and how many requests have a record.
"""

import asyncio
import hashlib
import json
import sys
import threading
from pathlib import Path

import uvloop

from coldstart_bench.loaders.answering import NOTHING, OPEN, Answering, chunk, recorded_in
from contracts.control import Feed, KeyRow, ModelRow, ReplicaRow, Scope, TenantRow, VersionRow
from contracts.frames import CONTENT_TYPE, Counts, End, Frame, FrameKind, encode_frame
from contracts.manifest import Limits
from contracts.timeline import Span, Stage
from contracts.wire import encode
from service.unix import SocketDirectory

VERSION = "be" * 32
_END = encode(End(finish_reason="stop", spans=(Span(Stage.TOKENIZED, 100), Span(Stage.PREFILLED, 200))))
_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
WHOLE = json.dumps(
    {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [_CHOICE], "usage": _USAGE}
).encode()
_DELTA = {"index": 0, "delta": {"content": "hello"}, "finish_reason": None}
EVENT = (
    b"data: %s\n\n"
    % json.dumps(
        {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [_DELTA]}
    ).encode()
)
DONE = b"data: [DONE]\n\n"


def frame(kind: FrameKind, payload: bytes, tokens: int = 2) -> bytes:
    """As a runtime sends it."""
    return encode_frame(Frame(kind, Counts(3, 0, tokens, tokens * 10), payload))


_HEAD = OPEN % CONTENT_TYPE.encode()
_WHOLE = _HEAD + chunk(frame(FrameKind.DATA, WHOLE) + frame(FrameKind.END, _END)) + b"0\r\n\r\n"
_PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)


class World:
    """What all connections share."""

    def __init__(self, key: str, rate: float) -> None:
        self.every_s = 1 / rate
        self.asked = 0
        self.recorded: set[bytes] = set()
        secret = hashlib.sha256(key.encode()).hexdigest()
        limits = Limits(65536, 65536, 1024, 1 << 20)
        feed = Feed(
            revision=1,
            full=True,
            tenants=(TenantRow(tenant="default", suspended=False),),
            keys=(KeyRow(key_id="bench", secret_sha256=secret, tenant="default", scopes=(Scope.INFER,)),),
            models=(ModelRow(tenant="default", model="m", aliases={"prod": VERSION}, created_at_s=1),),
            versions=(VersionRow(tenant="default", model="m", version=VERSION, limits=limits, created_at_s=1),),
            replicas=(
                ReplicaRow(
                    runtime_id="front",
                    tenant="default",
                    model="m",
                    version=VERSION,
                    address="rt-front.sock",
                    max_streams=1024,
                    draining=False,
                    restore=(),
                ),
            ),
        )
        self.feed = OPEN % b"application/x-ndjson" + chunk(encode(feed) + b"\n")


class Connection(Answering):
    """One request after another, each answered by its path at once; a stream by a clock."""

    def __init__(self, world: World, *, framed: bool) -> None:
        super().__init__()
        self._world = world
        self._framed = framed
        self._next: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def answer(self, path: bytes, body: bytes) -> None:
        """By its path."""
        if path.startswith(b"/v1/chat/"):
            if b'"stream": true' in body:
                self._transport.write(_HEAD)
                self._say(1, int(json.loads(body)["max_tokens"]), asyncio.get_running_loop().time())
            else:
                self._world.asked += self._framed
                self._transport.write(_WHOLE if self._framed else _PLAIN)
        elif path == b"/internal/v1/feed":
            self._transport.write(self._world.feed)
        else:
            if path == b"/internal/v1/usage/requests":
                self._world.recorded.update(recorded_in(body))  # what is shipped again is no other record
            self._transport.write(NOTHING)

    def _say(self, number: int, last: int, at_s: float) -> None:
        """The token of that number; the next one when it is due, however late this one was."""
        if number == last:
            end = frame(FrameKind.DATA, EVENT + DONE, number) + frame(FrameKind.END, _END, number)
            self._transport.write(chunk(end) + b"0\r\n\r\n")
            return
        self._transport.write(chunk(frame(FrameKind.DATA, EVENT, number)))
        due_s = at_s + self._world.every_s
        self._next = asyncio.get_running_loop().call_at(due_s, self._say, number + 1, last, due_s)


async def serve(data: Path, key: str, rate: float) -> None:
    """Until stdin ends."""
    world, loop = World(key, rate), asyncio.get_running_loop()
    directory, ended = SocketDirectory(data / "run"), asyncio.Event()
    inner = [  # kept: a server that nobody refers to is collected, and listens no more
        await loop.create_unix_server(lambda: Connection(world, framed=True), sock=directory.listen(name))
        for name in ("control.sock", "rt-front.sock")
    ]
    plain = await loop.create_server(lambda: Connection(world, framed=False), "127.0.0.1", 0)
    port = plain.sockets[0].getsockname()[1]

    def answer() -> None:
        print("ready", flush=True)
        for _ in sys.stdin:
            told = {"port": port, "asked": world.asked, "recorded": len(world.recorded)}
            print(json.dumps(told), flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=answer, daemon=True).start()
    await ended.wait()
    for server in (*inner, plain):
        server.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
