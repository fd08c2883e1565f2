"""`python -m weightcache` starts from its settings, ends on SIGTERM and with its supervisor, one per directory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weightcache.kit import make_version
from tests.weightcache.processes import environment, leasing, started

VERSION = make_version(seed=1)
SOFT = 64  # descriptors; enough for an agent at rest


def test_life(tmp_path: Path) -> None:
    """It serves a lease, refuses a second agent over its directory, drains on SIGTERM, and exits 0."""
    with started(tmp_path) as agent:
        agent.publish(VERSION)
        agent.wait_up()
        with agent.acquire(VERSION) as lease:
            second = subprocess.run(
                [sys.executable, "-m", "weightcache"],
                env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert second.returncode == 1
            assert "another cache agent is running" in second.stderr
            agent.acquire(VERSION).close()  # the first one's sockets are untouched
            agent.process.send_signal(signal.SIGTERM)
            assert agent.process.wait(30) == 0
            assert lease.view(0, lease.total_bytes) == VERSION.linear


@pytest.mark.parametrize(("recheck", "share"), [("tag", 1), ("digest", 0)])
def test_recheck(tmp_path: Path, recheck: str, share: int) -> None:
    """What was hashed once is recognised when it is read again; or it is hashed again, where that is asked for."""
    total = len(VERSION.linear)
    with started(tmp_path, KELVIN_RECHECK=recheck) as agent:
        agent.publish(VERSION)
        agent.wait_up()
        for recognised in (0, 0, total * share):
            with leasing(agent, VERSION):
                pass
            agent.wait_for("nobody has it", lambda state: state.holders == 0)
            agent.wait_for("it is on the disk", lambda state: state.nvme.bytes == total)
            assert agent.state().nvme.recognised_bytes == recognised
            agent.evict("host")


def test_lifeline(tmp_path: Path) -> None:
    """It ends when the other end of its lifeline is gone."""
    end, other = os.pipe()
    with started(tmp_path, KELVIN_LIFELINE_FD=str(end)) as agent:
        agent.wait_up()
        os.close(end)
        os.close(other)
        assert agent.process.wait(30) == 0


def test_versions_beyond_the_soft_limit(tmp_path: Path) -> None:
    """Each in memory takes a descriptor: where the hard limit allows that, the soft one refuses none."""
    versions = [make_version(seed=number, pages=(1,), files=()) for number in range(2 * SOFT)]
    with started(tmp_path, within=("sh", "-c", f'ulimit -Sn {SOFT}; exec "$@"', "sh")) as agent:
        agent.wait_up()
        for version in versions:
            agent.publish(version)
            with agent.acquire(version) as lease:
                assert lease.view(0, lease.total_bytes) == version.linear


def test_bad_setting() -> None:
    """A bad setting is one line that names it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KELVIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "weightcache"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "KELVIN_DATA=: is required"
