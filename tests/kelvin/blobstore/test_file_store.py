"""The file store is a `BlobStore`. A crash or a full disk never leaves a partial object."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BadKey, BlobStore, BlobUnavailable, StoreFull
from kelvin.blobstore.file_store import STAGING, STALE_S, FileStore
from kelvin.blobstore.retrying_store import RetryingStore
from kelvin.contracts.errors import CapacityExceeded
from tests.kelvin.blobstore.suite import BODY, BlobStoreSuite, keys_of, pieces


class TestFileStore(BlobStoreSuite):
    def open(self, path: Path) -> BlobStore:
        return FileStore(path)


def files_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_puts_leave_no_staged_file(tmp_path: Path) -> None:
    """The staging directory is empty after a put, whether the put wins, loses or is raced by others."""
    store = FileStore(tmp_path)

    await store.put_if_absent("t/a", BODY)
    await store.put_if_absent("t/a", pieces())
    await asyncio.gather(*(store.put_if_absent("t/b", pieces()) for _ in range(4)))
    assert files_under(tmp_path) == ["t/a", "t/b"]


async def test_foreign_entries_do_not_stop_a_store(tmp_path: Path) -> None:
    """A directory in staging is left alone. Files whose names are not valid keys are not listed."""
    foreign = tmp_path / STAGING / "lost+found"
    foreign.mkdir(parents=True)
    os.utime(foreign, (1, 1))
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "a").write_bytes(b"x")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    store = FileStore(tmp_path)
    await store.put_if_absent("t/a", BODY)
    assert await keys_of(store) == ["t/a"]
    assert foreign.is_dir()


CRASH = """
import asyncio, os, signal, sys
from pathlib import Path
from kelvin.blobstore import file_store as files

point = sys.argv[2]
real = getattr(os, point)

def dying(*args, **kwargs):
    if sys.argv[3] == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

store = files.FileStore(Path(sys.argv[1]))
Path(sys.argv[1], "t").mkdir()
setattr(os, point, dying)
asyncio.run(store.put_if_absent("t/a", b"x" * 100_000))
"""


@pytest.mark.parametrize(
    ("point", "when", "visible"),
    [
        pytest.param("write", "before", False, id="before the first byte"),
        pytest.param("write", "after", False, id="after a write"),
        pytest.param("fdatasync", "before", False, id="before the bytes are synced"),
        pytest.param("link", "before", False, id="between staging and naming"),
        pytest.param("link", "after", True, id="after naming the object is whole"),
    ],
)
def test_crash(tmp_path: Path, point: str, when: str, visible: bool) -> None:
    """A process killed at any point of a put leaves nothing under the key, or the whole object."""
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), point, when], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    store = FileStore(tmp_path)
    assert asyncio.run(keys_of(store)) == (["t/a"] if visible else [])
    assert asyncio.run(store.put_if_absent("t/a", b"x" * 100_000)) != visible
    assert asyncio.run(store.read("t/a")) == b"x" * 100_000


def test_crash_control(tmp_path: Path) -> None:
    """Negative control: a store that writes directly to the key's file fails the same scenario."""
    careless = CRASH.replace(
        "setattr(os, point, dying)",
        "files.FileStore._stage = lambda self: "
        "(Path(sys.argv[1], 't/a'), os.open(Path(sys.argv[1], 't/a'), os.O_WRONLY | os.O_CREAT))\n"
        "setattr(os, point, dying)",
    )
    subprocess.run([sys.executable, "-c", careless, str(tmp_path), "fdatasync", "before"], check=False, timeout=60)
    assert asyncio.run(keys_of(FileStore(tmp_path))) == ["t/a"]


def test_stale_staging_is_swept(tmp_path: Path) -> None:
    """Opening a store removes staged files older than a day. Recent ones may belong to another process and stay."""
    staging = tmp_path / STAGING
    staging.mkdir()
    (staging / "old").write_bytes(b"x")
    (staging / "young").write_bytes(b"x")
    then = (staging / "old").stat().st_mtime - STALE_S - 60
    os.utime(staging / "old", (then, then))
    FileStore(tmp_path)
    assert files_under(tmp_path) == [f"{STAGING}/young"]


RACER = """
import asyncio, sys
from pathlib import Path
from kelvin.blobstore.file_store import FileStore

store = FileStore(Path(sys.argv[1]))
sys.stdin.read()
sys.exit(asyncio.run(store.put_if_absent("t/a", sys.argv[2].encode() * 300_000)))
"""


def test_one_winner_over_processes(tmp_path: Path) -> None:
    """Of several processes that put one key at once, exactly one wins, and the object has its bytes."""
    marks = "abcd"
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [subprocess.Popen([*command, mark], stdin=subprocess.PIPE) for mark in marks]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()  # start the put
    won = [racer.wait(60) for racer in racers]
    assert sorted(won) == [0, 0, 0, 1]
    assert asyncio.run(FileStore(tmp_path).read("t/a")) == marks[won.index(1)].encode() * 300_000


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put on a full disk raises `StoreFull` without a retry and leaves nothing. Later it succeeds."""
    store = FileStore(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space")

        patch.setattr(os, "write", full)
        for data in (BODY, pieces()):
            with pytest.raises(StoreFull) as refused:
                asyncio.run(RetryingStore(store).put_if_absent("t/a", data))
            assert refused.value.failure == CapacityExceeded("bytes in the object store", 1, 0)
    assert files_under(tmp_path) == []
    assert asyncio.run(store.put_if_absent("t/a", BODY))


async def test_key_and_parent(tmp_path: Path) -> None:
    """The file store refuses a key that is a parent or a child of an existing key. The existing object stays."""
    store = FileStore(tmp_path)

    await store.put_if_absent("t/a/b", b"x")
    with pytest.raises(BadKey):
        await store.put_if_absent("t/a", b"y")
    with pytest.raises(BadKey):
        await store.put_if_absent("t/a/b/c", b"y")
    assert await keys_of(store) == ["t/a/b"]


async def test_cancelled_read_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled `read_into` returns only after its thread has finished, so that the caller may reuse the memory."""
    store = FileStore(tmp_path)
    await store.put_if_absent("t/a", BODY)
    reading, proceed = threading.Event(), threading.Event()
    real = os.preadv

    def slow(*args: object) -> int:
        reading.set()
        assert proceed.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", slow)

    into = bytearray(100)
    task = asyncio.create_task(store.read_into("t/a", 0, memoryview(into)))
    await asyncio.to_thread(reading.wait, 30)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bytes(into) == BODY[:100]


@pytest.mark.parametrize("where", ["", "t", "t/packs"])
def test_link_to_itself_stops_no_listing(tmp_path: Path, where: str) -> None:
    """A symbolic link to itself is ignored by listings. A linked directory is listed."""
    store = FileStore(tmp_path / "store")
    asyncio.run(store.put_if_absent("t/packs/a", BODY))
    (tmp_path / "store" / where / "loop").symlink_to("loop")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b").write_bytes(b"x")
    (tmp_path / "store" / "linked").symlink_to(tmp_path / "elsewhere")
    assert {"t/packs/a", "linked/b"} <= set(asyncio.run(keys_of(store)))


def test_disk_that_keeps_leftovers_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only disk can still be read from."""
    asyncio.run(FileStore(tmp_path).put_if_absent("t/a", BODY))
    leftover = tmp_path / STAGING / "left"
    leftover.write_bytes(b"x")
    os.utime(leftover, (1, 1))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert asyncio.run(FileStore(tmp_path).read("t/a")) == BODY


def test_object_that_cannot_be_opened_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stat` works without permission to open the object, for listings of sizes. A read raises `BlobUnavailable`."""
    store = FileStore(tmp_path)
    asyncio.run(store.put_if_absent("t/a", BODY))
    opened = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if path == tmp_path / "t" / "a":
            raise PermissionError(errno.EACCES, "refused")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert asyncio.run(store.stat("t/a")).size == len(BODY)
    with pytest.raises(BlobUnavailable):
        asyncio.run(store.read("t/a"))
