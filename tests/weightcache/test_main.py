"""`python -m weightcache` runs from its settings, one per data directory, and ends on SIGTERM or with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weightcache.kit import make_version
from tests.weightcache.processes import environment, lease_in_process, start_agent

VERSION = make_version(seed=1)
SOFT = 64  # file descriptors; enough for an idle agent


def test_agent_serves_excludes_a_second_and_drains(tmp_path: Path) -> None:
    """The agent grants a lease, refuses a second agent over its directory, drains on SIGTERM, and exits 0."""
    with start_agent(tmp_path) as agent:
        agent.publish(VERSION)
        agent.wait_up()
        with agent.acquire(VERSION) as lease:
            second = subprocess.run(
                [sys.executable, "-m", "weightcache"],
                env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert second.returncode == 1
            assert "another cache agent is running" in second.stderr
            agent.acquire(VERSION).close()  # the first agent's sockets still work
            agent.process.send_signal(signal.SIGTERM)
            assert agent.process.wait(30) == 0
            assert lease.view(0, lease.total_bytes) == VERSION.linear


@pytest.mark.parametrize(("recheck", "share"), [("tag", 1), ("digest", 0)])
def test_recheck_setting_decides_tag_or_digest(tmp_path: Path, recheck: str, share: int) -> None:
    """With `KELVIN_RECHECK=tag`, a later read from NVMe is recognised by its tag; with `digest`, it is hashed again."""
    total = len(VERSION.linear)
    with start_agent(tmp_path, KELVIN_RECHECK=recheck) as agent:
        agent.publish(VERSION)
        agent.wait_up()
        for recognised in (0, 0, total * share):
            with lease_in_process(agent, VERSION):
                pass
            agent.wait_for("no process holds it", lambda state: state.holders == 0)
            agent.wait_for("it is on NVMe", lambda state: state.nvme.bytes == total)
            assert agent.state().nvme.recognised_bytes == recognised
            agent.evict("host")


def test_agent_ends_with_its_lifeline(tmp_path: Path) -> None:
    """The agent ends when the other end of its lifeline is closed."""
    end, other = os.pipe()
    with start_agent(tmp_path, KELVIN_LIFELINE_FD=str(end)) as agent:
        agent.wait_up()
        os.close(end)
        os.close(other)
        assert agent.process.wait(30) == 0


def test_versions_beyond_the_soft_limit(tmp_path: Path) -> None:
    """Each version in memory takes a descriptor. The agent raises its soft limit as far as the hard limit allows."""
    versions = [make_version(seed=number, pages=(1,), files=()) for number in range(2 * SOFT)]
    with start_agent(tmp_path, within=("sh", "-c", f'ulimit -Sn {SOFT}; exec "$@"', "sh")) as agent:
        agent.wait_up()
        for version in versions:
            agent.publish(version)
            with agent.acquire(version) as lease:
                assert lease.view(0, lease.total_bytes) == version.linear


def test_bad_setting() -> None:
    """A bad setting is reported in one line with its name."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KELVIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "weightcache"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "KELVIN_DATA=: is required"
