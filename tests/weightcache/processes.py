"""Agents as real processes, alone (`start_agent`) or as peers (`start_nodes`), and the clients that lease from them:
one process (`lease_in_process`), or many threads at once (`Waiters`).
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldstart_bench.harness.installation import free_ports
from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.errors import Refused
from kelvin.ipc.socket_directory import SocketDirectory
from tests.eventually import wait
from tests.loop_thread import HOST
from tests.weightcache.kit import HUGE, TENANT, RunningAgent, Version, settings_of, until_ready
from tests.weightcache.peer_kit import SECRET, url_of
from weightcache.app.app import HTTP_SOCKET

START = "from weightcache.__main__ import main\nmain()\n"
# Nodes without ownership: a node reads from a peer that has the chunk, and never waits for one to read it.
WITHOUT_TURNS = """
from weightcache.peers import peer_group
from weightcache.peers.ownership_policy import ChunkState

def choose_node(own_node, digest, peer_states, busy_nodes):
    return next((node for node, state in peer_states.items() if state is ChunkState.READY), None)

peer_group.choose_node = choose_node
"""
# Nodes with long timeouts, so that none takes another one for dead or hung on a busy machine.
PATIENT = """
from weightcache.peers import peer_client, peer_group

peer_client.CONNECT_S = peer_client.ANSWER_S = peer_client.SILENCE_S = 120.0
peer_group.OWNER_STALL_S = peer_group.OWN_STALL_S = 120.0
"""
WAIT_S = 120.0


@dataclass(frozen=True)
class AgentProcess(RunningAgent):
    """An agent in its own process."""

    process: "subprocess.Popen[str]"

    def wait_up(self) -> None:
        socket = self.settings.run / HTTP_SOCKET
        wait(lambda: socket.exists() or self.process.poll() is not None, "it listens", WAIT_S)
        asyncio.run(until_ready(self.directory, lambda: self.process.poll() is None))
        assert self.process.poll() is None, "it did not start"


def environment(data: Path, slabs: int = 8, **more: str) -> dict[str, str]:
    small = {"KELVIN_SLAB_BYTES": str(HUGE), "KELVIN_HOST_BYTES": str(slabs * HUGE)}
    return os.environ | {"KELVIN_DATA": str(data)} | small | more


@contextmanager
def start_agent(
    data: Path, script: str | None = None, *arguments: str, within: Sequence[str] = (), slabs: int = 8, **more: str
) -> Iterator[AgentProcess]:
    """Start `python -m weightcache`, or `script`, over the data directory. It is killed when the block ends.

    `within` is a command that runs it, `more` its environment. It logs to `data/log`. See `AgentProcess.wait_up`.
    """
    words = ("-m", "weightcache") if script is None else ("-c", script, *arguments)
    fds = [int(more["KELVIN_LIFELINE_FD"])] if "KELVIN_LIFELINE_FD" in more else []
    settings = settings_of(data, slabs=slabs)
    with closing(SocketDirectory(settings.run)) as directory, (data / "log").open("a") as log:
        process = subprocess.Popen(
            [*within, sys.executable, *words],
            env=environment(data, slabs, **more), stderr=log, text=True, pass_fds=fds,
        )  # fmt: skip
        try:
            yield AgentProcess(settings, directory, FileStore(data / "store"), process)
        finally:
            process.kill()
            process.wait(WAIT_S)


@contextmanager
def start_nodes(
    root: Path, count: int, store_url: str, *, peers: bool = True, before: str = ""
) -> Iterator[list[AgentProcess]]:
    """Yield `count` running agents over one store. With `peers`, all are peers. `before` is code that runs first."""
    ports = free_ports(count)
    root.mkdir(exist_ok=True)
    key = root / "peers.key"
    key.write_bytes(SECRET + b"\n")
    key.chmod(0o600)
    with ExitStack() as stack:
        agents = []
        for number, port in enumerate(ports):
            more = {
                "KELVIN_STORE": store_url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
                "KELVIN_HEDGE_PERCENT": "0",
            }  # fmt: skip
            if peers:
                more |= {
                    "KELVIN_PEER_LISTEN": f"{HOST}:{port}", "KELVIN_PEER_KEY": str(key),
                    "KELVIN_PEERS": ",".join(map(url_of, ports)),
                }  # fmt: skip
            agents.append(stack.enter_context(start_agent(root / f"node{number}", before + START, slabs=16, **more)))
        for agent in agents:
            agent.wait_up()
        yield agents


class Dialog:
    """A Python process that exchanges lines with the test by its standard input and output."""

    def __init__(self, script: str, *arguments: str) -> None:
        command = [sys.executable, "-c", script, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        """Return its next line, or "" if the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)


@contextmanager
def start_dialog(script: str, *arguments: str) -> Iterator[Dialog]:
    one = Dialog(script, *arguments)
    try:
        yield one
    finally:
        one.kill()


# Leases a version and prints `leased`. `close`, `again` and `hang up` change the lease; any other line is answered with
# a digest of the leased bytes.
LEASING = """
import sys
from pathlib import Path
from blake3 import blake3
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client import libc
from weightcache.client.lease import acquire

directory = SocketDirectory(Path(sys.argv[1]))
lease = acquire(directory, sys.argv[2], sys.argv[3], 30.0)
print("leased", flush=True)
for line in sys.stdin:
    if line == "hang up\\n":
        lease._sock.close()  # the connection alone: the mapping stays
        print("hung up", flush=True)
    elif line == "close\\n":
        lease.close()
        print("closed", flush=True)
    elif line == "again\\n":
        lease = acquire(directory, sys.argv[2], sys.argv[3], 30.0)
        print("leased", flush=True)
    else:
        print(blake3(libc.view(lease.address, lease.total_bytes)).hexdigest(), flush=True)
"""


@contextmanager
def lease_in_process(agent: RunningAgent, version: Version) -> Iterator[Dialog]:
    """Yield another process that has a lease of the version."""
    with start_dialog(LEASING, str(agent.settings.run), TENANT, version.id) as one:
        assert one.hear() == "leased"
        yield one


class Waiters:
    """Threads that lease the version, one lease each, from the nodes in turn. All begin at once."""

    def __init__(self, agents: Sequence[AgentProcess], version: Version, count: int) -> None:
        self.count = count
        self.by_tier: Counter[str] = Counter()
        self._version = version
        self._lock = threading.Lock()
        threading.stack_size(256 << 10)
        self._threads = ThreadPoolExecutor(count)
        self._outcomes: list[tuple[int, Future[bool]]] = [
            (number % len(agents), self._threads.submit(self._lease, agents[number % len(agents)], number))
            for number in range(count)
        ]

    def _lease(self, agent: AgentProcess, number: int) -> bool:
        """Lease, and return whether the bytes are right. Every 97th thread compares all bytes. Raises `Refused`."""
        with agent.acquire(self._version, timeout_s=WAIT_S) as lease:
            with self._lock:
                self.by_tier.update(lease.bytes_by_tier)
            whole = self._version.linear
            if number % 97 == 0:
                return lease.view(0, lease.total_bytes) == whole
            at = number * 7919 * 4096 % (len(whole) - 4096)
            return lease.view(at, 4096) == whole[at : at + 4096]

    def right(self) -> Counter[int]:
        """Wait for all threads. Return how many got the right bytes, by node. Refused threads are not counted."""
        found: Counter[int] = Counter()
        for at, outcome in self._outcomes:
            try:
                right = outcome.result(WAIT_S)
            except Refused:
                continue
            assert right, "wrong bytes"
            found[at] += 1
        self._threads.shutdown()
        threading.stack_size(0)
        return found
