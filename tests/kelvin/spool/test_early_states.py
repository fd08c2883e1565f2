"""Every state in which a kill, a power cut or a foreign program can leave a spool directory is readable."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kelvin.spool.frame import HEADER_BYTES, encode_frame
from kelvin.spool.inspection import frames_after, unshipped
from kelvin.spool.leftover_recovery import RecoveredSource, leftover_records, list_spools, recover
from kelvin.spool.segment_disk import segment_name
from kelvin.spool.segment_reader import DAMAGED, POSITION, SegmentReader, last_sequence
from kelvin.spool.shipper import Post
from kelvin.spool.source_directory import SourceDirectory
from kelvin.spool.spool import Spool

FRAME = encode_frame(1, b"record")
SECOND = encode_frame(2, b"second")

# files in the source's directory, and the records that can be read from them
STATES = [
    pytest.param({}, [], id="no file at all"),
    pytest.param({POSITION: b""}, [], id="an empty position"),
    pytest.param({POSITION: bytes(12)}, [], id="a position of zeros"),
    pytest.param({POSITION: b"\1\0\0"}, [], id="a torn position"),
    pytest.param({segment_name(1): b""}, [], id="an empty segment"),
    pytest.param({segment_name(1): bytes(4096)}, [], id="a segment of zeros"),
    pytest.param({segment_name(1): FRAME[:HEADER_BYTES]}, [], id="a header without its payload"),
    pytest.param({segment_name(1): FRAME[: HEADER_BYTES - 1]}, [], id="half a header"),
    pytest.param({segment_name(1): FRAME[:-1]}, [], id="a torn record"),
    pytest.param({segment_name(1): FRAME + SECOND[:-1]}, [b"record"], id="a torn record behind a whole one"),
    pytest.param({segment_name(1): FRAME, segment_name(2): b""}, [b"record"], id="an empty segment behind a record"),
    pytest.param({segment_name(1): FRAME, segment_name(2): bytes(64)}, [b"record"], id="zeros behind a record"),
]


def _write_files(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _collect(into: list[bytes]) -> Callable[[str], Post]:
    def post_for(_: str) -> Post:
        async def post(records: Sequence[bytes]) -> None:
            into.extend(records)

        return post

    return post_for


@pytest.mark.parametrize(("files", "records"), STATES)
async def test_every_early_state_is_read(tmp_path: Path, files: dict[str, bytes], records: list[bytes]) -> None:
    """Each reader sees exactly the complete records, and the source is shipped. Only a torn segment is kept."""
    source = tmp_path / "supervisor-1"
    _write_files(source, files)
    assert list(leftover_records(tmp_path, lambda _: True)) == records
    assert [frame.payload for frame in frames_after(source, 0)] == records
    assert [frame.payload for _, frame in unshipped(tmp_path)] == records
    assert dict(list_spools(tmp_path)) == {"supervisor-1": (0, len(records))}
    batch = SegmentReader(source).read(last_sequence(source), 10, 1000)
    assert list(() if batch is None else batch.payloads) == records
    shipped: list[bytes] = []
    assert await recover(tmp_path, _collect(shipped)) == [RecoveredSource("supervisor-1", len(records), 0, 0)]
    assert shipped == records
    torn = {name: content for name, content in files.items() if name != POSITION and content.rstrip(b"\0") != FRAME}
    kept = {f"{name}{DAMAGED}": content for name, content in torn.items() if content.strip(b"\0")}
    assert {path.name: path.read_bytes() for path in source.glob("*")} == kept
    assert source.exists() == bool(kept)


@pytest.mark.parametrize(("files", "records"), STATES)
def test_every_early_state_is_written_on(tmp_path: Path, files: dict[str, bytes], records: list[bytes]) -> None:
    """The next record gets the next sequence and is read after the old ones."""
    _write_files(tmp_path / "one", files)
    spool = Spool.open(tmp_path, "one")
    assert spool.append_blocking(lambda _: b"next") == len(records) + 1
    spool.close()
    assert list(leftover_records(tmp_path, lambda _: True)) == [*records, b"next"]


def test_a_source_killed_before_its_first_record_is_read(tmp_path: Path) -> None:
    """Locking a source creates its directory and position, but no segment."""
    SourceDirectory.lock(tmp_path, "supervisor-1").close()
    assert list(leftover_records(tmp_path, lambda _: True)) == []


async def test_foreign_entries_of_the_spool_are_passed_over(tmp_path: Path) -> None:
    """An entry whose name is no valid source is not read, shipped or removed."""
    foreign = {segment_name(1): FRAME, "position": b""}
    for name in ("lost+found", ".new-x", ".Trash-1000", "a b"):
        _write_files(tmp_path / name, foreign)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "lost+found")
    _write_files(tmp_path / "supervisor-1" / "a" / "b" / "c", {"file": b"x"})
    (tmp_path / "supervisor-1" / segment_name(1)).write_bytes(FRAME)
    (tmp_path / "supervisor-1" / segment_name(2)).mkdir()
    (tmp_path / "supervisor-1" / "lost+found").mkdir()
    assert list(leftover_records(tmp_path, lambda _: True)) == [b"record"]
    assert [source for source, _ in unshipped(tmp_path)] == ["supervisor-1"]
    assert dict(list_spools(tmp_path)) == {"supervisor-1": (0, 1)}
    shipped: list[bytes] = []
    assert await recover(tmp_path, _collect(shipped)) == [RecoveredSource("supervisor-1", 1, 0, 0)]
    assert shipped == [b"record"]
    assert (tmp_path / "lost+found" / segment_name(1)).read_bytes() == FRAME
    assert (tmp_path / "supervisor-1" / "a" / "b" / "c" / "file").exists()


async def test_one_unreadable_source_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery leaves the unreadable source and ships the others."""
    for source in ("activator-1", "activator-2", "activator-3"):
        _write_files(tmp_path / source, {segment_name(1): FRAME})
    lock = SourceDirectory.try_lock

    def refusing(root: Path, source: str) -> SourceDirectory | None:
        if source == "activator-2":
            raise PermissionError(13, "Permission denied", str(root / source))
        return lock(root, source)

    monkeypatch.setattr(SourceDirectory, "try_lock", refusing)
    shipped: list[bytes] = []
    report = await recover(tmp_path, _collect(shipped))
    assert [found.source for found in report if found.shipped] == ["activator-1", "activator-3"]
    assert (tmp_path / "activator-2" / segment_name(1)).exists()


async def test_a_directory_of_another_user_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops no reader, and is logged once for all of them."""
    for source in ("activator-1", "photos"):
        _write_files(tmp_path / source, {segment_name(1): FRAME})
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path.name != "photos")
    for _ in range(3):
        assert list(leftover_records(tmp_path, lambda _: True)) == [b"record"]
        assert [source for source, _ in unshipped(tmp_path)] == ["activator-1"]
    shipped: list[bytes] = []
    await recover(tmp_path, _collect(shipped))
    assert shipped == [b"record"]
    assert (tmp_path / "photos" / segment_name(1)).exists()
    assert len(caplog.records) == 1


def test_unreadable_segment_stops_no_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded lives, unshipped records and listings are still read from the other sources."""
    for source in ("supervisor-1", "supervisor-2"):
        _write_files(tmp_path / source, {segment_name(1): FRAME})
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == tmp_path / "supervisor-1" / segment_name(1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert list(leftover_records(tmp_path, lambda _: True)) == [b"record"]
    assert [source for source, _ in unshipped(tmp_path)] == ["supervisor-2"]
    assert dict(list_spools(tmp_path)) == {"supervisor-1": (0, 0), "supervisor-2": (0, 1)}


def test_a_source_that_is_there_is_claimed_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control plane must start even if the disk of its backup journal is full."""

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    SourceDirectory.lock(tmp_path, "journal").close()
    monkeypatch.setattr(Path, "write_bytes", full)
    home = SourceDirectory.lock(tmp_path, "journal")
    with pytest.raises(OSError, match="No space"):
        SourceDirectory.lock(tmp_path, "another")
    home.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
