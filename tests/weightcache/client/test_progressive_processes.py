"""Progressive leases between processes: an agent that is held in the middle of a version, readers that die there."""

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
from tests.weightcache.processes import AgentProcess, Talking, started
from weightcache.client.spans_policy import Spans

VERSION = make_version(seed=1, pages=(300, 30, 17), chunk_pages=16)
TOTAL = VERSION.manifest.total_bytes
HALF = 10 * 16 * 4096

# The agent as it starts, but that what lies in packs behind an offset is read only once a file is gone.
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
# Leases, and says which parts it may read and what it reads there, until all of it came or it is refused.
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
# Reads what it was not told to be there, as a runtime would that is wrong.
HASTY = """
import ctypes, sys
from pathlib import Path
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

lease = acquire(SocketDirectory(Path(sys.argv[1])), "acme", sys.argv[2], 60.0, progressive=True)
if sys.argv[3] == "told":
    print(lease.view(0, 1) == ctypes.string_at(lease.address, 1), flush=True)
ctypes.string_at(lease.address + lease.total_bytes - 1, 1)
print("read", flush=True)
"""


@dataclass(frozen=True)
class Held(AgentProcess):
    """An agent whose store has the version, and the gate before the second half of each pack."""

    gate: Path

    def open_gate(self) -> None:
        self.gate.unlink(missing_ok=True)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    gate = tmp_path / "gate"
    gate.touch()
    with started(tmp_path, HELD, str(HALF), str(gate), KELVIN_LOG_LEVEL="error") as agent:
        agent.publish(VERSION)
        agent.wait_up()
        yield Held(agent.settings, agent.directory, agent.store, agent.process, gate)


class Reader(Talking):
    """A process that leases the version."""

    def __init__(self, agent: Held, how: str) -> None:
        super().__init__(READER, str(agent.settings.run), VERSION.id, how)
        self.told = Spans(TOTAL)

    def read(self, end: int) -> str:
        """Take in what it says until all before `end` was read, or it is over; that last line."""
        while not self.told.covers(0, end):
            first, _, rest = (line := self.hear()).partition(" ")
            if not first.isdigit():
                return line
            last, digest = rest.split()
            self.told.add(int(first), int(last))
            assert digest == blake3(VERSION.linear[int(first) : int(last)]).hexdigest()
        return line

    @property
    def is_silent(self) -> bool:
        assert self.process.stdout is not None
        return select.select([self.process.stdout], [], [], 0)[0] == []


@contextmanager
def reading(agent: Held, how: str = "progressive") -> Iterator[Reader]:
    one = Reader(agent, how)
    try:
        yield one
    finally:
        one.kill()


def test_the_first_parts_are_read_while_the_last_are_missing(held: Held) -> None:
    """By another process than the one that reads the store. Negative control: whoever wants a whole lease has nothing
    by then.
    """
    with reading(held) as early, reading(held, "whole") as late:
        early.read(HALF)
        state = held.wait_for("both are there", lambda state: state.connections == 2)
        assert (state.leases, state.leases_granted, state.holders) == (1, 0, 1)
        assert state.host.loading == len(VERSION.digests) - state.host.chunks > 0
        assert not early.told.is_whole
        assert late.is_silent
        held.open_gate()
        early.read(TOTAL)
        assert early.hear() == "whole"
        late.read(TOTAL)
        assert late.hear() == "whole"


@pytest.mark.deep
def test_a_reader_that_is_killed_in_the_middle(held: Held) -> None:
    """Its lease, what it waited for and its slabs are given back; the next one is served."""
    with reading(held) as early:
        early.read(HALF)
        early.kill()
        held.wait_for("it is forgotten", lambda state: (state.leases, state.holders) == (0, 0))
        held.open_gate()
        held.wait_for("all is given back", lambda state: state.host.slabs_busy == state.host.loading == 0)
    with held.acquire(VERSION) as lease:
        assert lease.view(0, TOTAL) == VERSION.linear


@pytest.mark.deep
def test_an_agent_that_is_killed_in_the_middle(held: Held) -> None:
    """Its reader learns that it is gone, and is not given more than it was told."""
    with reading(held) as early:
        early.read(HALF)
        held.process.kill()
        assert early.read(TOTAL) == "unavailable"
        assert not early.told.is_whole


@pytest.mark.deep
@pytest.mark.parametrize("first", ["told", "not told"])
def test_what_was_not_told_can_not_be_read(held: Held, first: str) -> None:
    """It is not a matter of being careful: the process that tries ends, and reads nothing."""
    command = [sys.executable, "-c", HASTY, str(held.settings.run), VERSION.id, first]
    died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGSEGV
    assert "read" not in died.stdout
    assert ("True" in died.stdout) == (first == "told")


@pytest.mark.deep
def test_what_was_told_can_be_read_control(held: Held) -> None:
    """Negative control: the same process, with all of it told, reads the last byte."""
    held.open_gate()
    held.acquire(VERSION).close()
    command = [sys.executable, "-c", HASTY, str(held.settings.run), VERSION.id, "told"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\nread\n"
