"""Replicas of a fixed speed behind an activator that is measured: so many slots, each of them taken for a stated time.

Arguments: data directory, and a file of JSON (`coldstart_bench/traffic/behind.py`, `Behind`). Says `ready`. A line of
JSON on stdin is answered with what was seen so far; `{"into": FILE}` writes the records that were shipped there, too.
"""

import asyncio
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from coldstart_bench.loaders.answering import NOTHING, OPEN, Answering, chunk, recorded_in
from coldstart_bench.traffic.behind import MODEL, Behind, Seen
from contracts.control import (
    Feed,
    KeyRow,
    ModelRow,
    ReplicaRow,
    RequestBatch,
    Scope,
    TenantLimits,
    TenantRow,
    VersionRow,
)
from contracts.frames import CONTENT_TYPE, Counts, End, Frame, FrameKind, encode_frame
from contracts.manifest import Limits
from contracts.timeline import Span, Stage
from contracts.wire import decoder, encode
from service.unix import SocketDirectory

VERSION: Final = "be" * 32
_HEAD: Final = OPEN % CONTENT_TYPE.encode()
_END: Final = encode(End(finish_reason="stop", spans=(Span(Stage.TOKENIZED, 100), Span(Stage.PREFILLED, 200))))
_LIMITS: Final = Limits(1 << 20, 1 << 20, 4096, 8 << 20)


class Asked(msgspec.Struct):
    """What of a completion's body sets how long it takes."""

    prompt: str
    max_tokens: int


def feed_of(behind: Behind) -> Feed:
    """All there is: the first tenant owns the model, the others are its guests."""
    owner, *guests = behind.keys
    keys = tuple(
        KeyRow(
            key_id=tenant, secret_sha256=hashlib.sha256(key.encode()).hexdigest(), tenant=tenant, scopes=(Scope.INFER,)
        )
        for tenant, key in behind.keys.items()
    )
    replica = ReplicaRow(
        runtime_id="slots",
        tenant=owner,
        model=MODEL,
        version=VERSION,
        address="rt-slots.sock",
        max_streams=behind.slots,
        draining=False,
        restore=(),
    )
    return Feed(
        revision=1,
        full=True,
        tenants=tuple(TenantRow(tenant=each, suspended=False, limits=TenantLimits()) for each in behind.keys),
        keys=keys,
        models=(ModelRow(owner, MODEL, {"prod": VERSION}, 1, grantees=tuple(guests)),),
        versions=(VersionRow(owner, MODEL, VERSION, _LIMITS, 1),),
        replicas=(replica,),
    )


class World:
    """What all connections share."""

    def __init__(self, behind: Behind) -> None:
        self.behind = behind
        self.feed = OPEN % b"application/x-ndjson" + chunk(encode(feed_of(behind)) + b"\n")
        self.batches: list[bytes] = []
        self.recorded: set[bytes] = set()
        self.inside = self.most_inside = self.answered = 0

    def seen(self) -> Seen:
        """Return what was answered and recorded so far."""
        every = (record for batch in self.batches for record in decoder(RequestBatch).decode(batch).records)
        records = {record.request_id: record for record in every}  # what is shipped again is no other record
        return Seen(self.answered, self.most_inside, tuple(records.values()))


class Connection(Answering):
    """One request after another; each takes its time, however many there are."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._next: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:  # its caller has gone, its slot is free
            self._next.cancel()
            self._world.inside -= 1

    def answer(self, path: bytes, body: bytes) -> None:
        """By its path."""
        if path == b"/v1/completions":
            self._begin(decoder(Asked).decode(body))
        elif path == b"/internal/v1/feed":
            self._transport.write(self._world.feed)
        else:
            if path == b"/internal/v1/usage/requests":
                self._world.batches.append(body)
                self._world.recorded.update(recorded_in(body))
            self._transport.write(NOTHING)

    def _begin(self, asked: Asked) -> None:
        world, behind = self._world, self._world.behind
        prompt = len(asked.prompt.split())
        takes_s = behind.slot_s + prompt * behind.prompt_token_s + asked.max_tokens * behind.token_s
        world.inside += 1
        world.most_inside = max(world.most_inside, world.inside)
        self._next = asyncio.get_running_loop().call_later(takes_s, self._end, prompt, asked.max_tokens)

    def _end(self, prompt: int, tokens: int) -> None:
        self._next = None
        self._world.inside -= 1
        self._world.answered += 1
        counts = Counts(prompt, 0, tokens, tokens * 10)
        text = f"{prompt} {tokens}"  # so that who asked sees that the answer is its own
        choice = {"index": 0, "finish_reason": "stop", "text": text}
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        whole = {
            "id": "x",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
        frames = encode_frame(Frame(FrameKind.DATA, counts, msgspec.json.encode(whole)))
        frames += encode_frame(Frame(FrameKind.END, counts, _END))
        self._transport.write(_HEAD + chunk(frames) + b"0\r\n\r\n")


async def serve(data: Path, behind: Behind) -> None:
    """Until stdin ends."""
    world, loop = World(behind), asyncio.get_running_loop()
    directory, ended = SocketDirectory(data / "run"), asyncio.Event()
    servers = [  # kept: a server that nobody refers to is collected, and listens no more
        await loop.create_unix_server(lambda: Connection(world), sock=directory.listen(name))
        for name in ("control.sock", "rt-slots.sock")
    ]

    def answer() -> None:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if "into" in asked:
                Path(asked["into"]).write_bytes(msgspec.json.encode(world.seen()))
            told = {"records": len(world.recorded)}
            print(json.dumps(told), flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=answer, daemon=True).start()
    await ended.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), decoder(Behind).decode(Path(sys.argv[2]).read_bytes())))
