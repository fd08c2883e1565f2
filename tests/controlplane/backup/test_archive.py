"""A backup with a changed or missing bit is refused."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.backup.archive import INDEX, ArchiveWriter, BadBackup, unpack
from kelvin.contracts.accounting.backup_reports import BACKUP_FORMAT, BackupIndex

FILES = {"ca.pem": b"certificate", "tls/ca.key": b"", "kelvin.db": bytes(range(256)) * 5}


def pack(files: dict[str, bytes], format: int = BACKUP_FORMAT) -> bytes:
    """Return an archive of these files."""
    packing, pieces = ArchiveWriter(), list[bytes]()
    for name, content in files.items():
        pieces += packing.file_pieces(name, io.BytesIO(content), len(content))
    index = BackupIndex(
        format=format, made_at_us=1, program="1", journal_after=None, members=tuple(packing.members), versions=()
    )
    return b"".join([*pieces, *packing.end_pieces(index)])


def read(raw: bytes, into: Path) -> dict[str, bytes]:
    """Unpack an archive and return its files."""
    index = unpack(io.BytesIO(raw), {name: into / name for name in FILES})
    return {member.name: (into / member.name).read_bytes() for member in index.members}


def test_unpacked_archive_equals_its_files(tmp_path: Path) -> None:
    """Any tar program can list it. Only the owner can read the unpacked files."""
    raw = pack(FILES)
    assert read(raw, tmp_path) == FILES
    assert (tmp_path / "kelvin.db").stat().st_mode & 0o777 == 0o600
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        assert archive.getnames() == [*FILES, INDEX, "index.sha256"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """This holds for contents, headers, padding, index and end."""
    raw = bytearray(pack(FILES))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadBackup):
        read(bytes(raw), tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_cut_file_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """This holds at any byte. A file with extra bytes is refused, too."""
    raw = pack(FILES)
    with pytest.raises(BadBackup):
        read(raw[: data.draw(st.integers(0, len(raw) - 1))], tmp_path)
    with pytest.raises(BadBackup, match="end is not where"):
        read(raw + b"\0", tmp_path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(lambda: pack({"../../etc/passwd": b"x"}), "no backup does", id="a path outside the directory"),
        pytest.param(lambda: pack({"notes.txt": b"x"}), "no backup does", id="an unknown file"),
        pytest.param(lambda: pack(FILES, format=BACKUP_FORMAT + 1), "format 2", id="a newer format"),
        pytest.param(lambda: b"not a tar" * 100, "no backup", id="not an archive"),
        pytest.param(lambda: b"", "cut short", id="empty"),
        pytest.param(lambda: pack({}) [1024:], "out of place", id="a seal without an index"),
    ],
)  # fmt: skip
def test_malformed_archive_is_refused_with_the_reason(tmp_path: Path, make: Callable[[], bytes], why: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(BadBackup, match=why):
        read(make(), tmp_path)


def test_a_source_that_ends_early_is_no_backup() -> None:
    """The source file shrank while it was read."""
    with pytest.raises(BadBackup, match="ended 4 bytes early"):
        list(ArchiveWriter().file_pieces("kelvin.db", io.BytesIO(b"half"), 8))
