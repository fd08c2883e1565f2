"""What a reader finds at the path is all of one content, whatever interrupts the writer."""

import os
from pathlib import Path

import pytest

from service.whole_file import write_whole


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_written(tmp_path: Path, mode: int) -> None:
    """Content and mode; a directory of its owner's alone; nothing else is left; again replaces it."""
    path = tmp_path / "tls" / "ca.key"
    for content in (b"first", b"x" * 100_000):
        write_whole(path, content, mode)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == mode
    assert list(path.parent.iterdir()) == [path]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until everything is on the disk the old content stands; a draft that was left is no obstacle."""
    path = tmp_path / "key"
    write_whole(path, b"old", 0o600)

    def full(fd: int) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            write_whole(path, b"new", 0o600)
    assert path.read_bytes() == b"old"
    write_whole(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
