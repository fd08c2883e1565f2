"""The saved feed on disk: what it holds, when it is written, and when it is valid."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from activator.routing import last_feed
from activator.routing.feed_client import FeedClient
from activator.routing.last_feed import NAME, LastFeed
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.serving.control_messages import Feed, KeyRow, RevisionRow, Scope
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.activator.control import ADMIN, KEY, OTHER, STRANGER, key_row, replica_row, snapshot, version_row
from tests.eventually import eventually

MAX_AGE_S = 100.0
WALL_S = 1_800_000_000.0


class _Clocks:
    """A monotonic and a wall clock, which stand until moved."""

    def __init__(self) -> None:
        self.s = 5.0
        self.back_s = 0.0

    def monotonic(self) -> float:
        return self.s

    def wall(self) -> float:
        return WALL_S + self.s - self.back_s


@pytest.fixture
def clocks() -> _Clocks:
    return _Clocks()


def _last(run: Path, clocks: _Clocks, table: RoutingTable | None = None) -> LastFeed:
    directory = SocketDirectory(run)
    return LastFeed(directory, table or RoutingTable(), MAX_AGE_S, clock=clocks.monotonic, wall_s=clocks.wall)


def _write(run: Path, clocks: _Clocks, *lines: Feed) -> bytes:
    """Return the file written by an activator that heard these lines."""

    async def main() -> None:
        table = RoutingTable()
        last = _last(run, clocks, table)
        for line in lines:
            table.apply(line)
            last.record_received(line)
        task = asyncio.create_task(last.run())
        try:
            await eventually(lambda: (run / NAME).exists())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return (run / NAME).read_bytes()


def test_feed_file_holds_the_table_and_no_key(tmp_path: Path, clocks: _Clocks) -> None:
    """The file has all changes and key digests only, and is private. An activator that reads it has the same table."""
    more: tuple[KeyRow, ...] = (
        msgspec.structs.replace(key_row("late", "kv-late", "default", Scope.INFER), expires_at_s=99),
        msgspec.structs.replace(key_row("some", "kv-some", "default", Scope.INFER), models=("m",)),
    )
    changes = Feed(
        revision=7, keys=more, removed_keys=("k3",), versions=(version_row("default", "m", "cc" * 32),),
        revisions=(RevisionRow(tenant="default", model="m", version="cc" * 32, namespace="models", name="m-cc"),),
    )  # fmt: skip
    content = _write(tmp_path, clocks, snapshot(), changes)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert not [key for key in (KEY, ADMIN, STRANGER, "kv-late") if key.encode() in content]
    first, second = RoutingTable(), RoutingTable()
    for line in (snapshot(), changes):
        first.apply(line)
    found = _last(tmp_path, clocks).try_load()
    assert found is not None
    second.apply(found)
    second.check_integrity()
    assert second.snapshot() == first.snapshot()
    assert second.principal(KEY, 0) == first.principal(KEY, 0) is not None
    assert second.principal(STRANGER, 0) is None
    assert (second.principal("kv-late", 98) is None, second.principal("kv-late", 99) is None) == (False, True)


def test_replicas_on_other_hosts_are_kept(tmp_path: Path, clocks: _Clocks) -> None:
    """A start does not wait for other hosts. A replica whose local socket is gone is left out."""
    far = msgspec.structs.replace(replica_row("far"), address="https://192.0.2.1:7")
    _write(tmp_path, clocks, snapshot(), Feed(revision=2, replicas=(far, replica_row("gone"))))
    found = _last(tmp_path, clocks).try_load()
    assert found is not None
    assert [row.runtime_id for row in found.replicas] == ["far"]


@pytest.mark.parametrize(
    ("later_s", "back_s", "same_boot", "counts"),
    [
        pytest.param(0, 0, True, True, id="at once"),
        pytest.param(MAX_AGE_S, 0, True, True, id="up to its age"),
        pytest.param(MAX_AGE_S + 1, 0, True, False, id="past its age"),
        pytest.param(0, 7200, True, True, id="a clock that was set back in the same boot"),
        pytest.param(0, -7200, True, True, id="a clock that was set forward in the same boot"),
        pytest.param(MAX_AGE_S + 1, 60, True, False, id="past its age, and a clock that was set back"),
        pytest.param(MAX_AGE_S, 0, False, True, id="after another boot, up to its age"),
        pytest.param(MAX_AGE_S + 1, 0, False, False, id="after another boot, past its age"),
        pytest.param(0, 59, False, True, id="after another boot, a clock that was set back a little"),
        pytest.param(0, 61, False, False, id="after another boot, a clock that was set back: the age is unknown"),
    ],
)
def test_feed_file_is_valid_up_to_its_max_age(
    tmp_path: Path,
    clocks: _Clocks,
    monkeypatch: pytest.MonkeyPatch,
    later_s: float,
    back_s: float,
    same_boot: bool,
    counts: bool,
) -> None:
    """Within one boot the age follows the monotonic clock, after another boot the wall clock."""
    _write(tmp_path, clocks, snapshot())
    clocks.s += later_s
    clocks.back_s = back_s
    if not same_boot:
        monkeypatch.setattr(last_feed, "boot_id", lambda: "another")
    last = _last(tmp_path, clocks)
    assert not last.is_fresh()
    assert (last.try_load() is not None) == last.is_fresh() == counts
    if counts:
        clocks.s += MAX_AGE_S + 1
        assert not last.is_fresh()
        last.record_received(Feed(revision=1))
        assert last.is_fresh()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:-9], id="cut"),
        pytest.param(lambda content: content.replace(b'"format":1', b'"format":2'), id="another format"),
        pytest.param(lambda content: content.replace(b'"keys"', b'"keyz"'), id="an unknown field"),
        pytest.param(lambda content: content.replace(b'"default', b'"\xff'), id="not UTF-8"),
        pytest.param(lambda content: content.replace(b'"heard_at_s":', b'"heard_at_s":-'), id="a negative time"),
    ],
)
def test_invalid_feed_file_is_ignored(tmp_path: Path, clocks: _Clocks, spoil: Callable[[bytes], bytes]) -> None:
    """An invalid file counts as missing. The next snapshot replaces it."""
    content = _write(tmp_path, clocks, snapshot())
    assert spoil(content) != content
    (tmp_path / NAME).write_bytes(spoil(content))
    assert _last(tmp_path, clocks).try_load() is None


def test_replicas_that_listen_no_more_are_left_out(tmp_path: Path, clocks: _Clocks) -> None:
    """Requests to a dead replica would fail."""
    _write(tmp_path, clocks, snapshot(), Feed(revision=2, replicas=(replica_row("a"), replica_row("b"))))
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as dead:
        alive.bind(str(tmp_path / "rt-a.sock"))
        alive.listen()
        dead.bind(str(tmp_path / "rt-b.sock"))
        found = _last(tmp_path, clocks).try_load()
    assert found is not None
    assert [row.runtime_id for row in found.replicas] == ["a"]


async def test_feed_file_is_written_on_change_and_periodically(
    tmp_path: Path, clocks: _Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not written for lines that change nothing. A failed write is tried again."""
    monkeypatch.setattr(last_feed, "WRITE_INTERVAL_S", 0.0)
    written: list[bytes] = []

    def write(path: Path, content: bytes, mode: int) -> None:
        written.append(content)
        if len(written) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(last_feed, "write_atomic", write)

    table = RoutingTable()
    last = _last(tmp_path, clocks, table)
    task = asyncio.create_task(last.run())
    table.apply(snapshot())
    last.record_received(snapshot())
    await eventually(lambda: len(written) == 2)
    for _ in range(20):
        last.record_received(Feed(revision=1))
        await asyncio.sleep(0)
    assert not last._due.is_set()
    clocks.s += last_feed.REWRITE_INTERVAL_S
    last.record_received(Feed(revision=1))
    await eventually(lambda: len(written) == 3)
    last.record_received(Feed(revision=2, removed_keys=("k1",)))
    await eventually(lambda: len(written) == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("speaks", [False, True])
async def test_live_feed_takes_precedence_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """The file is read only if the live feed says nothing for a moment."""
    monkeypatch.setattr("activator.routing.feed_client.PATIENCE_S", 0.01)

    directory = SocketDirectory(tmp_path)
    control = ServiceClient(directory, "control.sock", "the control plane")
    seen: list[Feed] = []
    feed = FeedClient(control, seen.append, "activator-1")
    if speaks:
        feed.synced.set()
    kept = Feed(revision=1, full=True)
    await feed.start_from_last_feed(lambda: kept, seen.append)
    assert feed.synced.is_set()
    assert seen == ([] if speaks else [kept])
    await control.close()
    directory.close()


def test_versions_of_one_model_stay_together() -> None:
    """A table's snapshot can be applied as a feed line: nothing is repeated or lost."""
    table = RoutingTable()
    table.apply(snapshot())
    names = [(row.model, row.version) for row in table.snapshot().versions if row.tenant == "default"]
    assert names == [("m", "aa" * 32), ("m", OTHER)]
