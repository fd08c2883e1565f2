"""An agent that is killed during an admission or healing leaves nothing torn, and the next one serves right bytes.

`KELVIN_TEST_KILLS` is the number of kills. Half of them happen during healing.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.errors import Refused
from tests.weightcache.kit import TENANT, make_version, publish, run_agent, settings_of
from tests.weightcache.processes import START, start_agent
from weightcache.nvme import chunk_files

VERSION = make_version(seed=5, pages=(40, 3, 17), chunk_pages=4)
KILLS = int(os.environ.get("KELVIN_TEST_KILLS", "8"))
DAMAGED = 5  # chunks that are damaged on NVMe before the agent heals them
ADMISSIONS = 1 + len(set(VERSION.digests))  # the manifest, then each chunk: open, write, sync, rename

# An agent that kills itself at the Nth system call of its admissions: before, halfway through or after it.
DYING = """
import os, signal, sys
from weightcache.nvme import chunk_files as files

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

def moved(args):
    return staged(args) or files.QUARANTINE in str(args[1])

def always(args):
    return True

def half(fd, parts, offset):
    pwritev(fd, [parts[0][: len(parts[0]) // 8192 * 4096]], offset)

pwritev = os.pwritev
os.open = dying(os.open, staged, lambda *_: None)
os.pwritev = dying(os.pwritev, always, half)
os.fdatasync = dying(os.fdatasync, always, lambda *_: None)
os.rename = dying(os.rename, moved, lambda *_: None)
"""
CARELESS = """
def write(self, path, data, *, direct):
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwritev(fd, [memoryview(data).cast("B")], 0)
    os.close(fd)

files.ChunkFiles.write = write
"""


def kill_while_admitting(data: Path, script: str, at: int, when: str) -> None:
    """Start an agent that kills itself at call `at`, and lease from it until it dies."""
    with start_agent(data, script, str(at), when) as agent:
        while agent.process.poll() is None:
            try:
                agent.acquire(VERSION).close()
                break
            except Refused:  # not up yet, or dead already
                with suppress(subprocess.TimeoutExpired):
                    agent.process.wait(0.02)
        assert agent.process.wait(60) == -signal.SIGKILL


def torn_chunks(data: Path) -> list[str]:
    """Return the chunk files whose content does not match their digest."""
    named = (data / "cache").glob("[!.]*/??/*")
    return [path.name for path in named if blake3(path.read_bytes()).hexdigest() != path.name]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the version in the store and an empty cache."""
    data = tmp_path_factory.mktemp("published")
    asyncio.run(publish(FileStore(data / "store"), VERSION))
    return data


@pytest.fixture(scope="module")
def admitted(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the version in the store and on NVMe."""
    data = tmp_path_factory.mktemp("admitted") / "data"
    shutil.copytree(published, data)
    with run_agent(settings_of(data)) as agent:
        agent.keep(VERSION)
    shutil.rmtree(data / "run")
    return data


def damage(data: Path, digests: Set[str], source: random.Random) -> None:
    """Flip a bit in these chunks on NVMe, and truncate some of them."""
    for digest in sorted(digests):
        path = data / "cache" / TENANT / digest[:2] / digest
        content = bytearray(path.read_bytes())
        content[source.randrange(len(content))] ^= 1
        path.write_bytes(content[: source.choice([len(content), len(content) // 2])])


def assert_whole(data: Path) -> None:
    """Assert that the next agent serves the right bytes, and that NVMe holds only whole chunks afterwards."""
    with run_agent(settings_of(data)) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(set(VERSION.digests)))
    assert torn_chunks(data) == []
    assert list((data / "cache" / chunk_files.STAGING).iterdir()) == []


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(0, KILLS, 2))
def test_agent_killed_while_admitting_leaves_nothing_torn(tmp_path: Path, published: Path, seed: int) -> None:
    """Every chunk file matches its digest after the kill, and the next agent serves the whole version."""
    source, data = random.Random(seed), tmp_path / "data"
    shutil.copytree(published, data)
    kill_while_admitting(
        data, DYING + START, source.randint(1, 4 * ADMISSIONS), source.choice(["before", "halfway", "after"])
    )
    assert torn_chunks(data) == []
    assert_whole(data)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(1, KILLS, 2))
def test_agent_killed_while_healing_leaves_nothing_torn(tmp_path: Path, admitted: Path, seed: int) -> None:
    """A kill between setting a file aside and replacing it tears no other file, and the next agent heals."""
    source, data = random.Random(seed), tmp_path / "data"
    shutil.copytree(admitted, data)
    bad = set(source.sample(sorted(set(VERSION.digests)), DAMAGED))
    damage(data, bad, source)
    kill_while_admitting(
        data, DYING + START, source.randint(1, 5 * DAMAGED), source.choice(["before", "halfway", "after"])
    )
    assert set(torn_chunks(data)) <= bad
    assert_whole(data)


def test_killed_control(tmp_path: Path, published: Path) -> None:
    """Negative control: without the staging area, a kill leaves torn chunks. Even then no torn bytes are served."""
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    kill_while_admitting(tmp_path, DYING + CARELESS + START, 2, "halfway")
    torn = torn_chunks(tmp_path)
    assert torn
    with run_agent(settings_of(tmp_path)) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert sum(agent.state().chunk_faults["nvme"].values()) == len(torn)
