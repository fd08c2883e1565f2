"""Progressive leases between real processes: agents and readers that are killed in the middle of a load."""

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from tests.weightcache.kit import make_version
from tests.weightcache.processes import AgentProcess, Dialog, start_agent
from weightcache.client.spans_policy import Spans

VERSION = make_version(seed=1, pages=(300, 30, 17), chunk_pages=16)
TOTAL = VERSION.manifest.total_bytes
HALF = 10 * 16 * 4096

# An agent that reads packs beyond an offset only after the gate file is removed.
HELD = """
import sys, time
from pathlib import Path
from kelvin.blobstore import file_store as files
from weightcache.__main__ import main

read, half, gate = files._read_into, int(sys.argv[1]), Path(sys.argv[2])

def held(key, path, offset, into):
    while "/packs/" in key and offset >= half and gate.exists():
        time.sleep(0.005)
    read(key, path, offset, into)

files._read_into = held
main()
"""
# A reader that prints each ready part with its digest, then `whole` or the code of the refusal.
READER = """
import sys
from pathlib import Path
from blake3 import blake3
from kelvin.contracts.errors import Refused
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

directory, version, progressive = SocketDirectory(Path(sys.argv[1])), sys.argv[2], sys.argv[3] == "progressive"
try:
    lease = acquire(directory, "acme", version, 60.0, progressive=progressive)
    for begin, end in lease.ready_parts():
        print(begin, end, blake3(lease.view(begin, end - begin)).hexdigest(), flush=True)
    print("whole", flush=True)
except Refused as refused:
    print(refused.failure.code, flush=True)
sys.stdin.read()
"""
# A reader that reads a part that is not ready, as a faulty runtime would.
HASTY = """
import ctypes, sys
from pathlib import Path
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

lease = acquire(SocketDirectory(Path(sys.argv[1])), "acme", sys.argv[2], 60.0, progressive=True)
if sys.argv[3] == "ready":
    print(lease.view(0, 1) == ctypes.string_at(lease.address, 1), flush=True)
ctypes.string_at(lease.address + lease.total_bytes - 1, 1)
print("read", flush=True)
"""


@dataclass(frozen=True)
class Held(AgentProcess):
    """An agent whose store has the version. The gate holds reads of the second half of each pack."""

    gate: Path

    def open_gate(self) -> None:
        self.gate.unlink(missing_ok=True)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    gate = tmp_path / "gate"
    gate.touch()
    with start_agent(tmp_path, HELD, str(HALF), str(gate), KELVIN_LOG_LEVEL="error") as agent:
        agent.publish(VERSION)
        agent.wait_up()
        yield Held(agent.settings, agent.directory, agent.store, agent.process, gate)


class Reader(Dialog):
    """A process that leases the version."""

    def __init__(self, agent: Held, how: str) -> None:
        super().__init__(READER, str(agent.settings.run), VERSION.id, how)
        self.ready = Spans(TOTAL)

    def read(self, end: int) -> str:
        """Read its output until all bytes before `end` are ready, or it has ended. Return the last line."""
        while not self.ready.covers(0, end):
            first, _, rest = (line := self.hear()).partition(" ")
            if not first.isdigit():
                return line
            last, digest = rest.split()
            self.ready.add(int(first), int(last))
            assert digest == blake3(VERSION.linear[int(first) : int(last)]).hexdigest()
        return line

    @property
    def is_silent(self) -> bool:
        assert self.process.stdout is not None
        return select.select([self.process.stdout], [], [], 0)[0] == []


@contextmanager
def start_reader(agent: Held, how: str = "progressive") -> Iterator[Reader]:
    one = Reader(agent, how)
    try:
        yield one
    finally:
        one.kill()


def test_the_first_parts_are_read_while_the_last_are_missing(held: Held) -> None:
    """Another process than the agent reads the first half. The control: a process with a whole lease has
    nothing yet.
    """
    with start_reader(held) as early, start_reader(held, "whole") as late:
        early.read(HALF)
        state = held.wait_for("both are connected", lambda state: state.connections == 2)
        assert (state.leases, state.leases_granted, state.holders) == (1, 0, 1)
        assert state.host.loading == len(VERSION.digests) - state.host.chunks > 0
        assert not early.ready.is_whole
        assert late.is_silent
        held.open_gate()
        early.read(TOTAL)
        assert early.hear() == "whole"
        late.read(TOTAL)
        assert late.hear() == "whole"


@pytest.mark.deep
def test_killed_reader_releases_everything(held: Held) -> None:
    """The killed reader's lease, load and slabs are released, and the next lease is granted."""
    with start_reader(held) as early:
        early.read(HALF)
        early.kill()
        held.wait_for("its lease is over", lambda state: (state.leases, state.holders) == (0, 0))
        held.open_gate()
        held.wait_for("the slabs are released", lambda state: state.host.slabs_busy == state.host.loading == 0)
    with held.acquire(VERSION) as lease:
        assert lease.view(0, TOTAL) == VERSION.linear


@pytest.mark.deep
def test_reader_notices_a_killed_agent(held: Held) -> None:
    """The reader's lease fails as unavailable, and it gets no further parts."""
    with start_reader(held) as early:
        early.read(HALF)
        held.process.kill()
        assert early.read(TOTAL) == "unavailable"
        assert not early.ready.is_whole


@pytest.mark.deep
@pytest.mark.parametrize("first", ["ready", "not ready"])
def test_what_was_not_told_can_not_be_read(held: Held, first: str) -> None:
    """A process that reads a part that is not ready dies of SIGSEGV before it gets a byte."""
    command = [sys.executable, "-c", HASTY, str(held.settings.run), VERSION.id, first]
    died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGSEGV
    assert "read" not in died.stdout
    assert ("True" in died.stdout) == (first == "ready")


@pytest.mark.deep
def test_what_was_told_can_be_read_control(held: Held) -> None:
    """Negative control: the same process reads the last byte if all of it is ready."""
    held.open_gate()
    held.acquire(VERSION).close()
    command = [sys.executable, "-c", HASTY, str(held.settings.run), VERSION.id, "ready"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\nread\n"
