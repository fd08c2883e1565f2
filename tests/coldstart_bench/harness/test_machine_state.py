"""The page cache is put into a state, and the state is verified."""

import os
from pathlib import Path

import pytest

from coldstart_bench.harness.machine_state import (
    PageCacheNotReady,
    _residency,
    describe_machine,
    drop_page_cache,
    gpus,
    retry_until_ok,
    source_commit,
    warm_page_cache,
)


def _pages(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return _residency(fd).count(1)
    finally:
        os.close(fd)


def test_a_dropped_file_is_gone_and_a_warmed_one_is_there(tmp_path: Path) -> None:
    """mincore shows that no page of a dropped file is cached, and that every page of a warmed one is."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert _pages(path) == 256
    drop_page_cache([path])
    assert _pages(path) == 0
    warm_page_cache([path])
    assert _pages(path) == 256


class Thief:
    """Undoes a state this many times."""

    def __init__(self, times: int) -> None:
        self.left, self.made = times, 0

    def again(self) -> None:
        self.made += 1

    def amiss(self) -> str | None:
        self.left -= 1
        return f"{self.left} left" if self.left >= 0 else None


def test_page_cache_is_prepared_a_bounded_number_of_times() -> None:
    """A state that is undone too often is refused with the reason."""
    lazy, eager = Thief(3), Thief(4)
    retry_until_ok(lazy.again, lazy.amiss, 3)
    assert lazy.made == 3
    with pytest.raises(PageCacheNotReady, match="0 left, after 3 attempts"):
        retry_until_ok(eager.again, eager.amiss, 3)
    assert eager.made == 3


def test_an_empty_file_is_warm(tmp_path: Path) -> None:
    """An empty file has no pages."""
    (tmp_path / "empty").touch()
    warm_page_cache([tmp_path / "empty"])


def test_machine_description_names_the_hardware() -> None:
    assert describe_machine()["cores"]
    assert source_commit() is None or len(source_commit() or "") >= 7


def test_without_git_a_commit_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git, as in an image, the commit is None."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit() is None


def test_gpus_are_named_by_their_driver(tmp_path: Path) -> None:
    """GPUs are listed by PCI address; none without a driver."""
    for address, model in (("0000:09:00.0", "NVIDIA L4"), ("0000:01:00.0", "NVIDIA H200")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t 42\n")
    assert gpus(tmp_path) == ["NVIDIA H200", "NVIDIA L4"]
    assert gpus(tmp_path / "none") == []
