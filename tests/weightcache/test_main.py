"""`python -m weightcache` starts from its settings, ends on SIGTERM and with its supervisor, one per directory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blobstore.files import FileStore
from service.unix import SocketDirectory
from tests.weightcache.kit import HUGE, TENANT, evict, make_version, publish, state_of, wait_for
from weightcache.client import acquire

VERSION = make_version(seed=1)
SOFT = 64  # descriptors; enough for an agent at rest


def environment(data: Path, **more: str) -> dict[str, str]:
    small = {"KELVIN_SLAB_BYTES": str(HUGE), "KELVIN_HOST_BYTES": str(4 * HUGE)}
    return os.environ | {"KELVIN_DATA": str(data)} | small | more


@contextmanager
def started(data: Path, *within: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    fds = [int(more["KELVIN_LIFELINE_FD"])] if "KELVIN_LIFELINE_FD" in more else []
    agent = subprocess.Popen(
        [*within, sys.executable, "-m", "weightcache"],
        env=environment(data, **more),
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )
    try:
        yield agent
    finally:
        agent.kill()
        agent.communicate(timeout=30)


async def up(directory: SocketDirectory) -> None:
    while not (directory.path / "cache.sock").exists():
        await asyncio.sleep(0.01)
    await wait_for(directory, "it answers", lambda _: True)


def wait_up(directory: SocketDirectory) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await up(directory)

    asyncio.run(main())


def test_life(tmp_path: Path) -> None:
    """It serves a lease, refuses a second agent over its directory, drains on SIGTERM, and exits 0."""
    directory = SocketDirectory(tmp_path / "run")
    asyncio.run(publish(FileStore(tmp_path / "store"), VERSION))
    with started(tmp_path) as agent:
        wait_up(directory)
        with acquire(directory, TENANT, VERSION.id, 30.0) as lease:
            second = subprocess.run(
                [sys.executable, "-m", "weightcache"],
                env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert second.returncode == 1
            assert "another cache agent is running" in second.stderr
            with acquire(directory, TENANT, VERSION.id, 30.0):
                pass  # the first one's sockets are untouched
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(30) == 0
            assert lease.view(0, lease.total_bytes) == VERSION.linear
    directory.close()


LEASE = """
import sys
from pathlib import Path
from service.unix import SocketDirectory
from weightcache.client import acquire

acquire(SocketDirectory(Path(sys.argv[1])), sys.argv[2], sys.argv[3], 30.0).close()
"""


@pytest.mark.parametrize(("recheck", "share"), [("tag", 1), ("digest", 0)])
def test_recheck(tmp_path: Path, recheck: str, share: int) -> None:
    """What was hashed once is recognised when it is read again; or it is hashed again, where that is asked for."""
    directory, total = SocketDirectory(tmp_path / "run"), len(VERSION.linear)
    asyncio.run(publish(FileStore(tmp_path / "store"), VERSION))
    with started(tmp_path, KELVIN_RECHECK=recheck):
        wait_up(directory)
        for recognised in (0, 0, total * share):
            subprocess.run([sys.executable, "-c", LEASE, directory.path, TENANT, VERSION.id], check=True, timeout=60)
            asyncio.run(wait_for(directory, "nobody has it", lambda state: state.holders == 0))
            asyncio.run(wait_for(directory, "it is on the disk", lambda state: state.nvme.bytes == total))
            assert asyncio.run(state_of(directory)).nvme.recognised_bytes == recognised
            asyncio.run(evict(directory, "host", None, None))
    directory.close()


def test_lifeline(tmp_path: Path) -> None:
    """It ends when the other end of its lifeline is gone."""
    directory = SocketDirectory(tmp_path / "run")
    end, other = os.pipe()
    with started(tmp_path, KELVIN_LIFELINE_FD=str(end)) as agent:
        wait_up(directory)
        os.close(end)
        os.close(other)
        assert agent.wait(30) == 0
    directory.close()


def test_versions_beyond_the_soft_limit(tmp_path: Path) -> None:
    """Each in memory takes a descriptor: where the hard limit allows that, the soft one refuses none."""
    directory, store = SocketDirectory(tmp_path / "run"), FileStore(tmp_path / "store")
    versions = [make_version(seed=number, pages=(1,), files=()) for number in range(2 * SOFT)]

    async def publish_all() -> None:
        for version in versions:
            await publish(store, version)

    asyncio.run(publish_all())
    with started(tmp_path, "sh", "-c", f'ulimit -Sn {SOFT}; exec "$@"', "sh"):
        wait_up(directory)
        for version in versions:
            with acquire(directory, TENANT, version.id, 30.0) as lease:
                assert lease.view(0, lease.total_bytes) == version.linear
    directory.close()


def test_bad_setting() -> None:
    """A bad setting is one line that names it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KELVIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "weightcache"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "KELVIN_DATA=: is required"
