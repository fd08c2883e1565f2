"""The last lines of a log are read without the rest of it."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.supervisor.log_rotation import last_lines


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"bc\n", b"\r\n", b"\xff", "\u2028\x85".encode(), b"x" * 70_000])),
    count=st.integers(1, 5),
)
def test_last_lines_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], count: int
) -> None:
    """Wherever a block of the reader ends, and with or without a last newline."""
    path = tmp_path_factory.mktemp("tail") / "x.log"
    path.write_bytes(b"".join(data))
    lines = path.read_bytes().splitlines()[-count:]
    assert last_lines(path, count) == [line.decode(errors="replace") for line in lines]


def test_a_long_file_is_not_read_whole(tmp_path: Path) -> None:
    """One line of a log of 32 MiB takes less than 1 MiB of memory."""
    path = tmp_path / "long.log"
    path.write_bytes(b"a line of a log\n" * (2 << 20))
    tracemalloc.start()
    try:
        assert last_lines(path, 1) == ["a line of a log"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
