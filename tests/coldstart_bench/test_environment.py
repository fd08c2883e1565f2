"""The page cache is brought into a state, and that state is checked."""

import os
from pathlib import Path

from coldstart_bench.environment import _resident_pages, commit, drop_page_cache, machine, warm_page_cache


def _pages(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return _resident_pages(fd)
    finally:
        os.close(fd)


def test_a_dropped_file_is_gone_and_a_warmed_one_is_there(tmp_path: Path) -> None:
    """Both states are seen through mincore, not assumed."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert _pages(path) == 256
    drop_page_cache([path])
    assert _pages(path) == 0
    warm_page_cache([path])
    assert _pages(path) == 256


def test_the_machine_is_described() -> None:
    """A report without its hardware says nothing."""
    assert machine()["cores"]
    assert commit() is None or len(commit() or "") >= 7
