"""Logs of child processes stay bounded while the children hold them open."""

import os
import resource
from pathlib import Path

import pytest

from kelvin.supervisor.log_rotation import rotate


def test_child_goes_on_in_the_truncated_file(tmp_path: Path) -> None:
    """A process with the log open loses no line, and writes on where the file begins anew."""
    path = tmp_path / "activator.log"
    with path.open("ab") as child:
        os.write(child.fileno(), b"first\n" * 10)
        rotate(path, limit_bytes=20)
        os.write(child.fileno(), b"second\n")
    assert path.read_bytes() == b"second\n"
    assert (tmp_path / "activator.log.1").read_bytes() == b"first\n" * 10


def test_second_rotation_replaces_the_older_file(tmp_path: Path) -> None:
    """Two files at most, however long a process lives."""
    path = tmp_path / "cache.log"
    for word in (b"a", b"b", b"c"):
        path.write_bytes(word * 30)
        rotate(path, limit_bytes=20)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache.log", "cache.log.1"]
    assert (tmp_path / "cache.log.1").read_bytes() == b"c" * 30


def test_log_within_the_limit_stays(tmp_path: Path) -> None:
    """Exactly at the limit nothing is moved."""
    path = tmp_path / "zygote.log"
    path.write_bytes(b"x" * 20)
    rotate(path, limit_bytes=20)
    assert [each.name for each in tmp_path.iterdir()] == ["zygote.log"]


def test_log_stays_where_the_copy_fails(tmp_path: Path) -> None:
    """A copy that can't be made truncates nothing."""
    path = tmp_path / "controlplane.log"
    path.write_bytes(b"x" * 30)
    (tmp_path / "controlplane.log.1").mkdir()
    with pytest.raises(OSError, match="directory"):
        rotate(path, limit_bytes=20)
    assert path.read_bytes() == b"x" * 30


def test_full_disk_gets_room_back(tmp_path: Path) -> None:
    """A copy that does not fit leaves nothing of itself. A log of more than twice the limit is emptied all the same."""
    path = tmp_path / "zygote.log"
    path.write_bytes(b"x" * 300_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a copy ends there as on a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            rotate(path, limit_bytes=200_000)
        assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("zygote.log", 300_000)]
        rotate(path, limit_bytes=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("zygote.log", 0)]
