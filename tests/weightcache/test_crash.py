"""Killed at any point of an admission, the agent leaves no torn chunk: the next one serves the right bytes."""

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from contracts.errors import Refused
from service.unix import SocketDirectory
from tests.weightcache.kit import HUGE, TENANT, make_version, running, settings_of
from weightcache.client import acquire

VERSION = make_version(seed=5, pages=(40, 3, 17), chunk_pages=4)
ADMISSIONS = 1 + len(set(VERSION.digests))  # the manifest, then each chunk: open, write, sync, name

# The agent as it starts, but that it kills itself at the Nth call of its admissions: before it, halfway or after it.
DYING = """
import os, signal, sys
from weightcache import files

left, when = int(sys.argv[1]), sys.argv[2]

def dying(real, counts, halfway):
    def call(*args, **kwargs):
        global left
        left -= counts(args)
        if not counts(args) or left != 0:
            return real(*args, **kwargs)
        if when == "after":
            real(*args, **kwargs)
        if when == "halfway":
            halfway(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

def staged(args):
    return files.STAGING in str(args[0])

def always(args):
    return True

def half(fd, parts, offset):
    pwritev(fd, [parts[0][: len(parts[0]) // 8192 * 4096]], offset)

pwritev = os.pwritev
os.open = dying(os.open, staged, lambda *_: None)
os.pwritev = dying(os.pwritev, always, half)
os.fdatasync = dying(os.fdatasync, always, lambda *_: None)
os.rename = dying(os.rename, staged, lambda *_: None)
"""
START = "from weightcache.__main__ import main\nmain()\n"
CARELESS = """
def write(self, path, data, *, direct):
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwritev(fd, [memoryview(data).cast("B")], 0)
    os.close(fd)

files.ChunkFiles.write = write
"""


def kill_while_admitting(data: Path, script: str, at: int, when: str) -> None:
    """Start an agent that dies so, and lease from it until it does."""
    settings = settings_of(data)
    env = os.environ | {
        "KELVIN_DATA": str(data),
        "KELVIN_SLAB_BYTES": str(HUGE),
        "KELVIN_HOST_BYTES": str(settings.host_bytes),
    }
    agent = subprocess.Popen([sys.executable, "-c", script, str(at), when], env=env, stderr=subprocess.DEVNULL)
    directory = SocketDirectory(settings.run)
    try:
        while agent.poll() is None:
            try:
                acquire(directory, TENANT, VERSION.id, 30.0).close()
                break
            except Refused:  # not up yet, or dead already
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(0.02)
        assert agent.wait(60) == -signal.SIGKILL
    finally:
        agent.kill()
        agent.wait(60)
        directory.close()


def torn_chunks(data: Path) -> list[str]:
    """Files that have a chunk's name and not its digest."""
    named = (data / "cache").glob("[!.]*/??/*")
    return [path.name for path in named if blake3(path.read_bytes()).hexdigest() != path.name]


def publish(data: Path) -> None:
    with running(settings_of(data)) as agent:
        agent.publish(VERSION)


@pytest.mark.parametrize("seed", range(8))
def test_killed(tmp_path: Path, seed: int) -> None:
    """At a random point: whatever has a chunk's name has its digest, and the version is served whole afterwards."""
    source = random.Random(seed)
    publish(tmp_path)
    kill_while_admitting(
        tmp_path, DYING + START, source.randint(1, 4 * ADMISSIONS), source.choice(["before", "halfway", "after"])
    )
    assert torn_chunks(tmp_path) == []
    with running(settings_of(tmp_path)) as agent, agent.acquire(VERSION) as lease:
        assert lease.view(0, lease.total_bytes) == VERSION.linear


def test_killed_control(tmp_path: Path) -> None:
    """Negative control: files written under their own names are torn by it. Even then nothing torn is served."""
    publish(tmp_path)
    kill_while_admitting(tmp_path, DYING + CARELESS + START, 2, "halfway")
    assert len(torn_chunks(tmp_path)) == 1
    with running(settings_of(tmp_path)) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert sum(agent.state().chunk_faults["nvme"].values()) == 1
