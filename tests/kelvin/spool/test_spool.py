"""Appends from event loops and threads: durable on return, one commit for many, bounded, and clean to close."""

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kelvin.contracts.errors import Internal, Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.spool import spool as module
from kelvin.spool.segment_disk import SegmentDisk
from kelvin.spool.spool import Spool
from tests.kelvin.spool.disks import DEADLINE_S, FailingDisk, GatedDisk
from tests.kelvin.spool.test_segment_writer import make, read_all


async def test_an_append_returns_after_the_sync(tmp_path: Path) -> None:
    """Appends wait for the disk's sync. Those that arrive meanwhile share the next sync."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)

    first = asyncio.create_task(spool.append(make("first")))
    await asyncio.to_thread(disk.reached.wait, DEADLINE_S)
    others = [asyncio.create_task(spool.append(make("other"))) for _ in range(100)]
    await asyncio.sleep(0)
    assert not first.done()
    assert spool.committed == 0
    disk.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await first == 1
        assert sorted(await asyncio.gather(*others)) == list(range(2, 102))
    assert disk.syncs == 2
    spool.close()
    assert len(read_all(tmp_path / "a-1")) == 101


def test_many_threads_and_a_loop_share_one_gapless_sequence(tmp_path: Path) -> None:
    """Each sequence is assigned once, and its record is the one whose append returned it."""
    spool = Spool.open(tmp_path, "a-1")

    async def loop_side() -> list[tuple[int, str]]:
        async def one(number: int) -> tuple[int, str]:
            return await spool.append(make(f"loop{number}")), f"loop{number}"

        return await asyncio.gather(*(one(number) for number in range(200)))

    def thread_side(thread: int) -> list[tuple[int, str]]:
        return [(spool.append_blocking(make(f"t{thread}.{number}")), f"t{thread}.{number}") for number in range(50)]

    with ThreadPoolExecutor(4) as threads:
        pending = [threads.submit(thread_side, thread) for thread in range(4)]
        assigned = asyncio.run(loop_side())
        for future in pending:
            assigned += future.result(DEADLINE_S)
    spool.close()
    assert sorted(sequence for sequence, _ in assigned) == list(range(1, 401))
    assert read_all(tmp_path / "a-1") == [f"{sequence}:{text}".encode() for sequence, text in sorted(assigned)]


async def test_cancelled_append_still_commits_its_record(tmp_path: Path) -> None:
    """The record of a cancelled append is written, and the committer continues."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)

    task = asyncio.create_task(spool.append(make("cancelled")))
    await asyncio.to_thread(disk.reached.wait, DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await spool.append(make("next")) == 2
    spool.close()
    assert read_all(tmp_path / "a-1") == [b"1:cancelled", b"2:next"]


async def test_a_closed_loop_does_not_stop_the_committer(tmp_path: Path) -> None:
    """A waiter whose event loop is gone is dropped. Its record stays."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)

    loop = asyncio.get_running_loop()
    task = loop.create_task(spool.append(make("abandoned")))
    await asyncio.to_thread(disk.reached.wait, DEADLINE_S)
    task.cancel()
    disk.gate.set()
    assert spool.append_blocking(make("next")) == 2
    spool.close()


def test_failing_disk_is_raised_and_shown_by_the_spool(tmp_path: Path) -> None:
    """The spool reports FAILING until a commit succeeds. The sequence has no hole."""
    disk = FailingDisk("write")
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    with pytest.raises(Refused) as caught:
        spool.append_blocking(make("lost"))
    assert caught.value.failure == Unavailable("the usage spool (its disk is full)")
    assert spool.failure == caught.value.failure
    assert "FAILING" in repr(spool)
    with pytest.raises(KeyError):  # nothing was written, so the state of the disk is still unknown
        spool.append_blocking(_no_record)
    assert "FAILING" in repr(spool)
    disk.fail.clear()
    assert spool.append_blocking(make("kept")) == 1
    assert "FAILING" not in repr(spool)
    spool.close()


def _no_record(sequence: int) -> bytes:
    raise KeyError(sequence)


def test_defect_of_the_committer_is_raised_and_survived(tmp_path: Path) -> None:
    """No append waits forever, and the next one succeeds."""

    class Defective(SegmentDisk):
        defect = True

        def sync(self, fd: int) -> None:
            if self.defect:
                raise AttributeError("a defect")
            super().sync(fd)

    disk = Defective()
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    with pytest.raises(Refused) as caught:
        spool.append_blocking(make("lost"))
    assert caught.value.failure == Internal()
    disk.defect = False
    assert spool.append_blocking(make("kept")) == 1
    spool.close()
    assert read_all(tmp_path / "a-1") == [b"1:kept"]


def test_waiting_is_bounded(tmp_path: Path) -> None:
    """An append above the limit is refused at once. A thread's wait has a deadline."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk, max_waiting=1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(spool.append_blocking, make("first"))
        assert disk.reached.wait(DEADLINE_S)
        with pytest.raises(Refused) as late:
            spool.append_blocking(make("second"), timeout_s=0.01)
        assert isinstance(late.value.failure, DeadlineExceeded)
        with pytest.raises(Refused) as full:
            spool.append_blocking(make("third"))
        assert full.value.failure == Overloaded("the usage spool's queue", 1, 1.0)
        disk.gate.set()
        assert first.result(DEADLINE_S) == 1
    spool.close()


@pytest.mark.parametrize(
    "follows", [pytest.param(True, id="with the next append"), pytest.param(False, id="by itself")]
)
async def test_unawaited_record_is_written_soon(tmp_path: Path, follows: bool) -> None:
    """The record is written with the next awaited append, or by itself a moment later."""
    spool = Spool.open(tmp_path, "a-1")

    for number in range(3):
        spool.append_unacknowledged(make(f"soon{number}"))
    assert spool.committed == 0
    if follows:
        assert await spool.append(make("next")) == 4
    committed = asyncio.Event()
    end = spool.subscribe(committed.set)
    async with asyncio.timeout(DEADLINE_S):
        while spool.committed < 3:
            await committed.wait()
    end()
    spool.close()
    assert read_all(tmp_path / "a-1")[:3] == [b"1:soon0", b"2:soon1", b"3:soon2"]


async def test_unawaited_records_are_bounded_and_their_loss_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An append above the limit is refused. If the disk fails, the loss is logged and the spool reports it."""
    disk = FailingDisk("write")
    spool = Spool.open(tmp_path, "a-1", disk=disk, max_waiting=1)

    spool.append_unacknowledged(make("lost"))
    with pytest.raises(Refused) as full:
        spool.append_unacknowledged(make("one too many"))
    assert full.value.failure == Overloaded("the usage spool's queue", 1, 1.0)
    async with asyncio.timeout(DEADLINE_S):
        while spool.failure is None:
            await asyncio.sleep(0)
    spool.close()
    assert "a record is lost" in caplog.messages


def test_closing_commits_what_waits(tmp_path: Path) -> None:
    """An append accepted before the close succeeds, and a later one is refused. A second close is harmless."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(spool.append_blocking, make("first"))
        assert disk.reached.wait(DEADLINE_S)
        second = threads.submit(spool.append_blocking, make("second"))
        closing = threads.submit(spool.close)
        disk.gate.set()
        closing.result(DEADLINE_S)
        assert first.result(DEADLINE_S) == 1
        late = second.exception(DEADLINE_S)
        if late is None:
            assert second.result() == 2
        else:  # the append came after the close
            assert isinstance(late, Refused)
            assert late.failure == Internal()
    with pytest.raises(Refused):
        spool.append_blocking(make("late"))
    spool.close()


def test_closing_on_a_disk_that_hangs_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing gives up on a disk that doesn't respond, with a log line, and keeps the lock until the disk does."""
    disk = GatedDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    with ThreadPoolExecutor(2) as threads:
        append = threads.submit(spool.append_blocking, make("first"))
        assert disk.reached.wait(DEADLINE_S)
        with monkeypatch.context() as patched:
            patched.setattr(module, "BLOCKING_TIMEOUT_S", 0.05)
            closing = threads.submit(spool.close)
            try:
                closing.result(5.0)
                with pytest.raises(BlockingIOError):
                    Spool.open(tmp_path, "a-1")
            finally:
                disk.gate.set()
        assert append.result(DEADLINE_S) == 1
    assert "the disk of a spool does not answer: records that wait are lost" in caplog.messages
    spool.close()
    Spool.open(tmp_path, "a-1").close()


def test_a_source_has_one_live_owner(tmp_path: Path) -> None:
    """A second open is refused while the first is alive. A directory with unshipped records stays after the close."""
    spool = Spool.open(tmp_path, "a-1")
    with pytest.raises(BlockingIOError):
        Spool.open(tmp_path, "a-1")
    spool.append_blocking(make("kept"))
    spool.close()
    assert (tmp_path / "a-1").exists()
    again = Spool.open(tmp_path, "a-1")
    assert again.append_blocking(make("next")) == 2
    again.close()


class RecordingDisk(SegmentDisk):
    """A disk that records what was made durable, in order: directories, or the bytes of a segment."""

    def __init__(self) -> None:
        self.synced: list[Path | str] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.synced.append("bytes")

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self.synced.append(directory)


def test_a_sources_name_is_durable_before_its_records_are(tmp_path: Path) -> None:
    """The directory is durable first, so that a power cut can't remove it with acknowledged records."""
    disk = RecordingDisk()
    spool = Spool.open(tmp_path, "a-1", disk=disk)
    spool.append_blocking(make("kept"))
    spool.close()
    assert disk.synced == [tmp_path, "bytes", tmp_path / "a-1"]


def test_a_name_that_does_not_become_durable(tmp_path: Path) -> None:
    """The open fails and releases the lock."""
    with pytest.raises(OSError, match="No space left"):
        Spool.open(tmp_path, "a-1", disk=FailingDisk("sync_directory"))
    Spool.open(tmp_path, "a-1").close()


def test_an_empty_spool_leaves_no_directory(tmp_path: Path) -> None:
    Spool.open(tmp_path, "a-1").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [pytest.param("unlink", id="read-only"), pytest.param("read_bytes", id="unreadable")])
def test_a_spool_on_a_disk_that_fails_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Closing releases the source, so the next owner can open it."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    spool = Spool.open(tmp_path, "a-1")
    with monkeypatch.context() as patched:
        patched.setattr(Path, call, refuse)
        spool.close()
    assert "a shipped spool can't be removed" in caplog.messages
    Spool.open(tmp_path, "a-1").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["", ".", "..", "a/b", ".hidden", "a" * 129, "a\0b"])
def test_a_source_is_a_plain_file_name(tmp_path: Path, source: str) -> None:
    """Any other name is refused with the rule."""
    with pytest.raises(ValueError, match="source"):
        Spool.open(tmp_path, source)


def test_loop_that_ended_before_its_wake_stops_no_append(tmp_path: Path) -> None:
    """The record is committed with the next append, from another loop or from a thread."""

    async def leave(spool: Spool) -> None:
        waiting = spool.append(make("left"))
        waiting.send(None)
        waiting.close()

    for name in ("loop", "thread"):
        spool = Spool.open(tmp_path, name)
        loop = asyncio.new_event_loop()  # `asyncio.run` would run one more iteration, which wakes the committer
        loop.run_until_complete(leave(spool))
        loop.close()
        assert spool.committed == 0, "nobody was woken"
        if name == "loop":
            assert asyncio.run(spool.append(make("next"))) == 2
        else:
            assert spool.append_blocking(make("next"), DEADLINE_S) == 2
        spool.close()
