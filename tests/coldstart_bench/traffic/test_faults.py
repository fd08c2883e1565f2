"""What a soak kills is found where it was installed."""

import sys
from pathlib import Path

import pytest

from coldstart_bench.traffic.faults import try_find_redis


def program(directory: Path) -> Path:
    directory.mkdir()
    made = directory / "redis-server"
    made.touch(mode=0o700)
    return made


def test_redis_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its directory is on no path, as for a command that is called by its own; else by the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert try_find_redis() is None
    elsewhere = program(tmp_path / "path")
    assert try_find_redis() == str(elsewhere)
    own = program(tmp_path / "bin")
    assert try_find_redis() == str(own)
