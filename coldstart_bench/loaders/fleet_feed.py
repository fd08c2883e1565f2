"""A control plane that tells activators of a fleet, and takes what they report. Arguments: data directory, and how many
models. Says `ready`, and ends with its standard input.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from coldstart_bench.fleet.names import feed_of
from coldstart_bench.loaders.answering import NOTHING, OPEN, Answering, chunk
from contracts.wire import encode
from service.unix import SocketDirectory


class Connection(Answering):
    """Of an activator."""

    def __init__(self, feed: bytes) -> None:
        super().__init__()
        self._feed = feed

    def answer(self, path: bytes, body: bytes) -> None:
        """The feed stays open."""
        self._transport.write(self._feed if path == b"/internal/v1/feed" else NOTHING)


async def serve(data: Path, models: int) -> None:
    """Until stdin ends."""
    feed = OPEN % b"application/x-ndjson" + chunk(encode(feed_of(models)) + b"\n")
    directory, loop = SocketDirectory(data / "run"), asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: Connection(feed), sock=directory.listen("control.sock"))
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
