"""`kelvin cache`: pods of one tenant on a node share loaded weights, and pods of another tenant don't."""

import asyncio
import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.ipc.socket_directory import SocketDirectory
from tests.kelvin.pods import PROMPT, kelvin, pod
from tests.runtime.processes import DEADLINE_S, Installation, poll_until
from tests.weightcache.kit import TENANT, Version, publish, read_state
from weightcache.app.api import State


def agent_state(run: Path) -> State:
    """Return the agent's state."""
    with closing(SocketDirectory(run, is_ours=False)) as directory:
        return asyncio.run(read_state(directory))


def test_a_second_pod_costs_no_bytes(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """A second pod reads nothing from store or disk. Both map the same memory, each keeps it when the other is killed,
    and neither starts an agent. A pod of another tenant is refused, although agent and store have the version."""
    house, version = sealed
    asyncio.run(publish(FileStore(house.data / "store"), version, "other"))
    run = tmp_path / "node" / "run"
    shared = ("--threads", "1", "--cache", str(run))
    with (
        kelvin(house, "cache", "--tenant", TENANT, "--data", str(tmp_path / "node")) as agent,
        pod(house, version.id, tmp_path / "one", *shared) as one,
        pod(house, version.id, tmp_path / "other", *shared, tenant="other") as other,
    ):
        poll_until("the first one is ready", one.is_ready)
        before = agent_state(run)
        assert before.bytes_read["store"] > 0
        _, lines = other.process.communicate(timeout=DEADLINE_S)
        assert other.process.returncode == 1
        failed = [json.loads(line) for line in lines.splitlines() if b'"failed"' in line]
        assert failed[0]["why"] == f"version '{version.id}' does not exist"
        from_here = ("--threads", "1", "--cache", os.path.relpath(run))
        with pod(house, version.id, tmp_path / "two", *from_here) as two:
            poll_until("the second one is ready", two.is_ready)
            after = agent_state(run)
            assert (after.bytes_read, after.host.bytes) == (before.bytes_read, before.host.bytes)
            assert (after.leases, after.holders) == (2, 2)
            for each in (one, two):
                with pytest.raises(AssertionError, match="weightcache is not there"):
                    each.child("weightcache")
            right = one.ask(PROMPT)
            os.kill(one.child("runtime.app.pod"), signal.SIGKILL)
            poll_until("the first one is forgotten", lambda: agent_state(run).holders == 1 or None)
            assert two.ask(PROMPT)[0] == right[0] == 200
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(DEADLINE_S) == 0
