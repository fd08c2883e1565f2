"""An atomic write is all or nothing, whatever interrupts the writer."""

import os
from pathlib import Path

import pytest

from kelvin.process.atomic_file import pending_file, remove_pending_files, write_atomic


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_atomic_write_replaces_the_file(tmp_path: Path, mode: int) -> None:
    """A write sets content and mode, creates a private directory, replaces the old file and leaves no other."""
    path = tmp_path / "tls" / "ca.key"
    for content in (b"first", b"x" * 100_000):
        write_atomic(path, content, mode)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == mode
    assert list(path.parent.iterdir()) == [path]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_interrupted_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old content stays until the new one is synced. A leftover draft doesn't stop the next write."""
    path = tmp_path / "key"
    write_atomic(path, b"old", 0o600)

    def full(fd: int) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            write_atomic(path, b"new", 0o600)
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new", 0o600)
    assert path.read_bytes() == b"new"


def test_a_draft_is_nothing_until_it_is_kept(tmp_path: Path) -> None:
    """A draft isn't visible under its final name. Without a commit it is deleted."""
    path = tmp_path / "backup"
    with pending_file(path, 0o600) as draft:
        draft.file.write(b"half")
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []
    with pending_file(path, 0o600) as draft:
        draft.file.write(b"all")
        draft.commit()
        assert path.read_bytes() == b"all"
    assert list(tmp_path.iterdir()) == [path]


def test_second_file_without_replace_is_refused(tmp_path: Path) -> None:
    """With `replace=False`, the second commit is refused and its draft deleted."""
    path = tmp_path / "key"
    with pending_file(path, 0o600) as first, pending_file(path, 0o600) as second:
        for draft, text in ((first, b"first"), (second, b"second")):
            draft.file.write(text)
        first.commit(replace=False)
        with pytest.raises(FileExistsError):
            second.commit(replace=False)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_drafts_of_a_killed_process(tmp_path: Path) -> None:
    """Drafts are recognised by name, and no other file is removed. One that can't be removed stops no others."""
    (tmp_path / ".kelvin-0.tar.0123456789abcdef").mkdir()
    (tmp_path / ".kelvin-2.tar.0123456789abcdef").mkdir()
    for name in (".kelvin-1.tar.0123456789abcdef", "kelvin-1.tar", ".kelvin-1.tar", ".other.0123456789abcdef"):
        (tmp_path / name).touch()
    remove_pending_files(tmp_path, "kelvin-*")
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {"kelvin-1.tar", ".kelvin-1.tar", ".other.0123456789abcdef"}
