"""An agent that is killed repeatedly under load tears no chunk file, and its readers keep all bytes of their leases.

`KELVIN_TEST_KILLS` is the number of kills.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.blobstore.file_store import FileStore
from tests.weightcache.kit import make_version, publish
from tests.weightcache.processes import START, AgentProcess, Dialog, start_agent, start_dialog
from tests.weightcache.test_crash import torn_chunks

VERSIONS = tuple(make_version(seed=n, pages=(300, 30, 17), chunk_pages=128) for n in range(6))  # each fills one slab
DIGESTS = {version.id: blake3(version.linear).hexdigest() for version in VERSIONS}
SLABS = 5
READERS = 2
KILLS = int(os.environ.get("KELVIN_TEST_KILLS", "3"))
PATIENCE_S = 120.0

# An agent that overwrites its slabs before it dies, as one would whose memory is not its readers' own.
CARELESS = """
import os, signal
from weightcache.host import slab_pool as slabs

made = []
make = slabs.Slab.__init__

def remembered(self, length):
    make(self, length)
    made.append(self)

def die(*_):
    for slab in made:
        slab.zero()
    os.kill(os.getpid(), signal.SIGKILL)

slabs.Slab.__init__ = remembered
signal.signal(signal.SIGUSR1, die)
"""
LEASING = """
import json, os, sys, time
from pathlib import Path
from blake3 import blake3
from kelvin.contracts.errors import Refused
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client import libc
from weightcache.client.lease import acquire

directory = SocketDirectory(Path(sys.argv[1]))

def digest(lease):
    return blake3(libc.view(lease.address, lease.total_bytes)).hexdigest()

def leased(version):
    limit = time.monotonic() + 60
    while True:
        lease = None
        try:  # every other process while it is being filled
            lease = acquire(directory, "acme", version, 30.0, progressive=os.getpid() % 2 == 0)
            lease.wait_until_whole()
            return lease
        except Refused as refused:
            if lease is not None:
                lease.close()
            # It is dead, or not up yet, or all slabs are lent for a moment.
            if refused.failure.code not in ("unavailable", "overloaded") or time.monotonic() > limit:
                raise
            time.sleep(0.01)
"""
# Leases each version named on standard input, keeps the last two leases, and prints digests of all bytes that it maps.
READER = (
    LEASING
    + """
kept = []
for line in sys.stdin:
    if line != "\\n":
        kept.append(leased(line.strip()))
        for old in kept[:-2]:
            old.close()
        del kept[:-2]
    print(json.dumps([[lease.version, digest(lease)] for lease in kept]), flush=True)
"""
)
# Child processes one after another lease a version and read all of it. Prints a line with the digest for each.
CHURN = (
    LEASING
    + """
import itertools, random
source = random.Random(int(sys.argv[2]))
for number in itertools.count():
    version = source.choice(sys.argv[3:])
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        lease = leased(version)
        os.write(write, json.dumps([version, digest(lease)]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, "rb") as answer:
        print(answer.read().decode() or "a lease failed", flush=True)
"""
)


def read_answer(process: Dialog) -> list[list[str]]:
    line = process.hear()
    assert line.startswith("["), line or "the process is dead"
    found: list[list[str]] = json.loads(line)
    return found


def agent(data: Path, script: str = START) -> AbstractContextManager[AgentProcess]:
    """Start an agent whose tiers are too small for all versions at once."""
    room = sum(len(version.linear) for version in VERSIONS)
    return start_agent(data, script, slabs=SLABS, KELVIN_NVME_BYTES=str(room * 2 // 3), KELVIN_LOG_LEVEL="error")


def wrong(seen: Sequence[Sequence[str]]) -> list[str]:
    """Return the versions with a wrong digest."""
    return [version for version, digest in seen if digest != DIGESTS[version]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory whose store has all versions."""
    store = FileStore(tmp_path / "store")
    for version in VERSIONS:
        asyncio.run(publish(store, version))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


@pytest.mark.deep
def test_leases_survive_killed_agents(data: Path) -> None:
    """Leases of killed agents stay readable, and each new agent grants new ones, while other clients keep it reading,
    admitting and evicting. All leased bytes are right, before and after each kill.
    """
    source, run = random.Random(1), str(data / "run")
    with ExitStack() as stack:
        readers = [stack.enter_context(start_dialog(READER, run)) for _ in range(READERS)]
        churns = [stack.enter_context(start_dialog(CHURN, run, str(n), *DIGESTS)) for n in range(2)]
        for kill in range(KILLS):
            with agent(data) as living:
                for reader in readers:
                    reader.say(source.choice(VERSIONS).id)
                for reader in readers:
                    assert wrong(read_answer(reader)) == [], f"at kill {kill}"
                for _ in range(source.randint(1, 8)):
                    version, digest = read_answer(source.choice(churns))
                    assert wrong([(str(version), str(digest))]) == [], f"at kill {kill}"
                living.process.send_signal(signal.SIGKILL)
                assert living.process.wait(PATIENCE_S) == -signal.SIGKILL
            for reader in readers:
                reader.say("")
            for reader in readers:
                seen = read_answer(reader)
                assert seen
                assert wrong(seen) == [], f"after kill {kill}"
            assert torn_chunks(data) == [], f"after kill {kill}"


@pytest.mark.deep
def test_control_overwritten_lease_is_detected(data: Path) -> None:
    """Negative control: an agent that overwrites leased memory before it dies is detected."""
    with start_dialog(READER, str(data / "run")) as reader, agent(data, CARELESS + START) as dying:
        reader.say(VERSIONS[0].id)
        assert wrong(read_answer(reader)) == []
        dying.process.send_signal(signal.SIGUSR1)
        assert dying.process.wait(PATIENCE_S) == -signal.SIGKILL
        reader.say("")
        assert wrong(read_answer(reader)) == [VERSIONS[0].id]
