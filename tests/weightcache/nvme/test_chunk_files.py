"""Chunk files are whole or absent after any crash, and torn files are told from absent ones."""

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused, Unavailable
from tests.weightcache.disks import fill, make_read_only, needs_a_disk, refuse_direct
from weightcache.nvme import chunk_files
from weightcache.nvme.chunk_files import MAX_QUARANTINED, ChunkFiles, ReadPath
from weightcache.sources.policy.healing import ReadOutcome

BODY = bytes(range(256)) * (2 * PAGE_BYTES // 256)
DIGEST = blake3(BODY).hexdigest()


def page_aligned_buffer(length: int) -> memoryview:
    return memoryview(mmap.mmap(-1, length))


@pytest.fixture
def tier(tmp_path: Path) -> ChunkFiles:
    tier = ChunkFiles(tmp_path)
    tier.open()
    tier.close()  # another test checks the lock
    return tier


def write_chunk(tier: ChunkFiles, body: bytes = BODY, digest: str = DIGEST) -> Path:
    into = page_aligned_buffer(len(body))
    into[:] = body
    path = tier.chunk_path("a", digest)
    tier.write(path, into, direct=True)
    return path


def read(tier: ChunkFiles, path: Path) -> tuple[ReadOutcome, bytes]:
    into = page_aligned_buffer(len(BODY))
    return tier.read(path, into).outcome, bytes(into)


@pytest.mark.parametrize("direct", [pytest.param(True, id="O_DIRECT"), pytest.param(False, id="O_DIRECT is refused")])
def test_round_trip(tier: ChunkFiles, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A written chunk is read back, with or without O_DIRECT, and the staging directory is empty."""
    if not direct:
        refuse_direct(monkeypatch)
    path = write_chunk(tier)
    assert read(tier, path) == (ReadOutcome.WHOLE, BODY)
    assert [found.digest for found in tier.scan()] == [DIGEST]
    assert os.listdir(path.parents[2] / chunk_files.STAGING) == []


def test_foreign_directories_are_left_alone(tier: ChunkFiles, tmp_path: Path) -> None:
    """Foreign directories in staging, quarantine or in place of a chunk stay. Staging files are removed."""
    write_chunk(tier)
    foreign = [
        tmp_path / chunk_files.STAGING / "lost+found",
        tmp_path / chunk_files.QUARANTINE / "lost+found",
        tier.chunk_path("b", DIGEST),
    ]
    for directory in foreign:
        directory.mkdir(parents=True)
    (tmp_path / chunk_files.STAGING / "draft").touch()
    tier.open()
    tier.close()
    for number in range(MAX_QUARANTINED + 1):
        tier.quarantine(write_chunk(tier), f"bad-{number}")
    write_chunk(tier)
    assert [found.tenant for found in tier.scan()] == ["a"]
    assert all(directory.is_dir() for directory in foreign)
    assert not (tmp_path / chunk_files.STAGING / "draft").exists()


def shorten(path: Path) -> None:
    os.truncate(path, PAGE_BYTES)


def cut_oddly(path: Path) -> None:
    os.truncate(path, len(BODY) - 1)


def lengthen(path: Path) -> None:
    os.truncate(path, 3 * PAGE_BYTES)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [shorten, cut_oddly, lengthen, empty])
def test_file_of_another_length_is_reported(tier: ChunkFiles, damage: Callable[[Path], None]) -> None:
    """A file of another length and a missing file are reported as such."""
    path = write_chunk(tier)
    damage(path)
    assert read(tier, path)[0] is ReadOutcome.LENGTH
    path.unlink()
    assert read(tier, path)[0] is ReadOutcome.MISSING


def test_read_that_ends_early_is_short(tier: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that comes in parts is whole. One that ends before the file's length is short."""
    path = write_chunk(tier)
    real = os.preadv

    def piecemeal(fd: int, parts: list[memoryview], offset: int) -> int:
        return real(fd, [parts[0][:PAGE_BYTES]], offset)

    monkeypatch.setattr(os, "preadv", piecemeal)
    assert read(tier, path) == (ReadOutcome.WHOLE, BODY)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: 0 if offset else piecemeal(fd, parts, offset))
    assert read(tier, path)[0] is ReadOutcome.SHORT


@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_only_disk_errors_make_a_file_unreadable(tier: ChunkFiles, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO means that the file is unreadable. Other errors, such as EMFILE, say nothing about the file."""
    path = write_chunk(tier)

    def failing(number: int) -> Callable[..., int]:
        def fail(*_: object) -> int:
            raise OSError(number, "broken")

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        assert read(tier, path)[0] is ReadOutcome.UNREADABLE
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EMFILE))
        with pytest.raises(Refused) as refused:
            read(tier, path)
        assert refused.value.failure == Unavailable("the NVMe tier of the weight cache")


def test_read_renews_recency(tier: ChunkFiles) -> None:
    """The time of the last read is kept in the file, for the next agent."""
    path = write_chunk(tier)
    os.utime(path, (1.0, 1.0))
    assert [found.used_at for found in tier.scan()] == [1.0]
    read(tier, path)
    assert [found.used_at for found in tier.scan()] > [1.0]


def test_time_to_come_is_now(tier: ChunkFiles) -> None:
    """A file time in the future is set to now, so the file ages as others do."""
    path = write_chunk(tier)
    os.utime(path, (2**33, 2**33))
    (first,) = tier.scan()
    assert first.used_at <= time.time()
    (second,) = tier.scan()
    assert second.used_at == pytest.approx(first.used_at, abs=0.001)


def test_scrub_reads_past_the_page_cache(tier: ChunkFiles, tmp_path: Path) -> None:
    """A scrub reads from the disk even if the file is cached: the page cache says nothing about the disk."""
    needs_a_disk(tmp_path)
    path = write_chunk(tier)
    path.read_bytes()
    into = page_aligned_buffer(len(BODY))
    assert tier.read(path, into).read_path is ReadPath.CACHED
    assert tier.read(path, into, touch=False).read_path is ReadPath.DIRECT
    assert bytes(into) == BODY


def test_a_disk_that_became_read_only_is_read(
    tier: ChunkFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the read can't be kept, but the bytes are read."""
    path = write_chunk(tier)
    make_read_only(monkeypatch, tmp_path)
    assert read(tier, path) == (ReadOutcome.WHOLE, BODY)


def test_failed_write_leaves_nothing(tier: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves neither the file nor a staging file."""
    fill(monkeypatch)
    with pytest.raises(OSError, match="no space"):
        write_chunk(tier)
    path = tier.chunk_path("a", DIGEST)
    assert not path.exists()
    assert os.listdir(path.parents[2] / chunk_files.STAGING) == []


def test_second_owner_is_refused(tmp_path: Path) -> None:
    """A second owner is refused until the first closes. Opening removes staging files of a crash."""
    first, second = ChunkFiles(tmp_path), ChunkFiles(tmp_path)
    first.open()
    with pytest.raises(BlockingIOError):
        second.open()
    (tmp_path / chunk_files.STAGING / "half").write_bytes(b"x")
    first.close()
    second.open()
    assert os.listdir(tmp_path / chunk_files.STAGING) == []
    second.close()


def test_scan_finds_only_chunk_names(tier: ChunkFiles, tmp_path: Path) -> None:
    write_chunk(tier)
    for name in ("a/zz/short", f"a/zz/{DIGEST}", f"a/{DIGEST[:2]}/{DIGEST}.tmp", f".hidden/{DIGEST[:2]}/{DIGEST}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [(found.tenant, found.digest) for found in tier.scan()] == [("a", DIGEST)]


def test_a_file_that_goes_during_a_scan(tier: ChunkFiles) -> None:
    """A file that is removed during a scan is left out."""
    paths = [write_chunk(tier, digest=DIGEST[:-1] + mark) for mark in "abc"]
    found = tier.scan()
    next(found)
    tier.remove(paths)
    assert list(found) == []


def test_quarantine_keeps_the_newest_files(tier: ChunkFiles, tmp_path: Path) -> None:
    """A quarantined file is moved aside, only the newest `MAX_QUARANTINED` are kept, and a missing file is no error."""
    for number in range(MAX_QUARANTINED + 3):
        tier.quarantine(write_chunk(tier), f"bad{number}")
    tier.quarantine(tier.chunk_path("a", DIGEST), "again")
    assert not tier.chunk_path("a", DIGEST).exists()
    kept = {name.split(".")[0] for name in os.listdir(tmp_path / chunk_files.QUARANTINE)}
    assert kept == {f"bad{number}" for number in range(3, MAX_QUARANTINED + 3)}
