"""FeedClient: it reconnects after any failure, keeps the last table, and applies the next snapshot."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from activator.routing import feed_client
from activator.routing.feed_client import FeedClient, with_remote_addresses
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.activator.control import replica_row
from tests.stub_server import StubServer

FULL = encode(Feed(revision=1, full=True)) + b"\n"
CHANGE = encode(Feed(revision=2)) + b"\n"


async def _follow(tmp_path: Path, scripts: list[list[bytes]], wanted: int) -> tuple[list[int], FeedClient]:
    """Follow a feed whose connections get one script each: a write per item, or no answer if empty. The last one stays
    open. Return the revisions applied, and the client.
    """
    turn = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        script, turn = scripts[min(turn, len(scripts) - 1)], turn + 1
        if not script:
            await asyncio.Event().wait()
        answer = web.StreamResponse()
        await answer.prepare(request)
        for data in script:
            await answer.write(data)
            await asyncio.sleep(0.01)
        if turn >= len(scripts):
            await asyncio.Event().wait()
        return answer

    directory = SocketDirectory(tmp_path)
    app = web.Application()
    app.router.add_get("/internal/v1/feed", serve)
    listening = StubServer(app)
    await listening.start(tmp_path / "control.sock")
    control = ServiceClient(directory, "control.sock", "the control plane")
    seen: list[int] = []
    enough = asyncio.Event()

    def apply(line: Feed) -> None:
        seen.append(line.revision)
        if len(seen) >= wanted:
            enough.set()

    client = FeedClient(control, apply, "activator-1")
    task = asyncio.create_task(client.run())
    try:
        await asyncio.wait_for(enough.wait(), 10)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await control.close()
        await listening.stop()
        directory.close()
    return seen, client


def test_remote_activator_uses_replica_urls() -> None:
    """A replica without a URL can't be reached and is left out. Other rows are unchanged."""
    there = msgspec.structs.replace(replica_row("a"), url="https://10.0.0.3:7")
    line = Feed(revision=3, replicas=(there, replica_row("b")), removed_replicas=("c",))
    seen = with_remote_addresses(line)
    assert [(row.runtime_id, row.address) for row in seen.replicas] == [("a", "https://10.0.0.3:7")]
    assert msgspec.structs.replace(seen, replicas=()) == msgspec.structs.replace(line, replicas=())


@pytest.mark.parametrize(
    ("first", "want"),
    [
        pytest.param([FULL + CHANGE], [1, 2, 1], id="the connection ends"),
        pytest.param([FULL[:10], FULL[10:] + CHANGE[:5], CHANGE[5:]], [1, 2, 1], id="lines in pieces"),
        pytest.param([FULL, b"nonsense\n"], [1, 1], id="an invalid line"),
        pytest.param([FULL, b'{"revision":2,"unknown":1}\n'], [1, 1], id="an unknown field"),
        pytest.param([FULL, b'{"revision":2,"removed_replicas":["\xff"]}\n'], [1, 1], id="a line that is not UTF-8"),
        pytest.param([CHANGE], [1], id="no snapshot first"),
        pytest.param([b""], [1], id="nothing at all"),
    ],
)
async def test_feed_reconnects_with_a_snapshot(tmp_path: Path, first: list[bytes], want: list[int]) -> None:
    """The second connection starts with the snapshot."""
    seen, client = await _follow(tmp_path, [first, [FULL]], len(want))
    assert seen == want
    assert client.synced.is_set()


async def test_silent_feed_is_reconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is silent for three heartbeats is closed."""
    monkeypatch.setattr(feed_client, "SILENCE_S", 0.1)
    seen, _ = await _follow(tmp_path, [[FULL]], 2)
    assert seen == [1, 1]


async def test_unanswered_feed_call_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control plane may have been stopped before the head of its answer, or its host may be gone."""
    monkeypatch.setattr(feed_client, "SILENCE_S", 0.1)
    seen, _ = await _follow(tmp_path, [[], [FULL]], 1)
    assert seen == [1]
