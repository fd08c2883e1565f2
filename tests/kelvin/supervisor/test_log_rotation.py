"""Logs of child processes stay bounded while the children hold them open. The last lines are read without the rest."""

import os
import resource
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.supervisor.log_rotation import last_lines, rotate


def test_child_goes_on_in_the_truncated_file(tmp_path: Path) -> None:
    """A process with the open log loses no line and continues in the empty file."""
    path = tmp_path / "activator.log"
    with path.open("ab") as child:
        os.write(child.fileno(), b"first\n" * 10)
        rotate(path, limit_bytes=20)
        os.write(child.fileno(), b"second\n")
    assert path.read_bytes() == b"second\n"
    assert (tmp_path / "activator.log.1").read_bytes() == b"first\n" * 10


def test_second_rotation_replaces_the_older_file(tmp_path: Path) -> None:
    """There are at most two files."""
    path = tmp_path / "cache.log"
    for word in (b"a", b"b", b"c"):
        path.write_bytes(word * 30)
        rotate(path, limit_bytes=20)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache.log", "cache.log.1"]
    assert (tmp_path / "cache.log.1").read_bytes() == b"c" * 30


def test_log_within_the_limit_stays(tmp_path: Path) -> None:
    """A log of exactly the limit isn't rotated."""
    path = tmp_path / "zygote.log"
    path.write_bytes(b"x" * 20)
    rotate(path, limit_bytes=20)
    assert [each.name for each in tmp_path.iterdir()] == ["zygote.log"]


def test_log_stays_where_the_copy_fails(tmp_path: Path) -> None:
    """A failed copy truncates nothing."""
    path = tmp_path / "controlplane.log"
    path.write_bytes(b"x" * 30)
    (tmp_path / "controlplane.log.1").mkdir()
    with pytest.raises(OSError, match="directory"):
        rotate(path, limit_bytes=20)
    assert path.read_bytes() == b"x" * 30


def test_full_disk_gets_room_back(tmp_path: Path) -> None:
    """A copy that doesn't fit is removed. A log of more than twice the limit is emptied without a copy."""
    path = tmp_path / "zygote.log"
    path.write_bytes(b"x" * 300_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a copy fails there, as on a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            rotate(path, limit_bytes=200_000)
        assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("zygote.log", 300_000)]
        rotate(path, limit_bytes=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("zygote.log", 0)]


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"bc\n", b"\r\n", b"\xff", "\u2028\x85".encode(), b"x" * 70_000])),
    count=st.integers(1, 5),
)
def test_last_lines_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], count: int
) -> None:
    """The result doesn't depend on the reader's blocks or on a last newline."""
    path = tmp_path_factory.mktemp("tail") / "x.log"
    path.write_bytes(b"".join(data))
    lines = path.read_bytes().splitlines()[-count:]
    assert last_lines(path, count) == [line.decode(errors="replace") for line in lines]


def test_a_long_file_is_not_read_whole(tmp_path: Path) -> None:
    """Reading the last line of a 32 MiB log takes less than 1 MiB of memory."""
    path = tmp_path / "long.log"
    path.write_bytes(b"a line of a log\n" * (2 << 20))
    tracemalloc.start()
    try:
        assert last_lines(path, 1) == ["a line of a log"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
