"""Leftover shared memory is memory that no process uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills import leftovers

HAS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
opened = open(sys.argv[2], "wb")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_shared_memory_of_a_neighbour_is_not_left() -> None:
    """Shared memory of a live process is not left over. Without the process it is, except a killed PostgreSQL's."""
    names = [f"kelvin-test-{os.getpid()}-{which}" for which in ("mapped", "opened")]
    killed = Path("/dev/shm", f"PostgreSQL.{os.getpid()}")
    paths = [Path("/dev/shm", name) for name in names]
    try:
        with subprocess.Popen(
            [sys.executable, "-c", HAS, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert not leftovers.shared_memory() & set(names)
        killed.touch()
        assert leftovers.shared_memory() >= set(names)
        assert killed.name not in leftovers.shared_memory()
    finally:
        for path in (*paths, killed):
            path.unlink(missing_ok=True)
