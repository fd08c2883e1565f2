"""Agents as processes, each a node with a directory of its own, and many who wait for a version at all of them."""

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import Refused
from service.unix import SocketDirectory
from tests.loops import HOST
from tests.ports import free_ports
from tests.weightcache.kit import HUGE, TENANT, Version, state_of, wait_for
from tests.weightcache.peer_kit import SECRET, url_of
from weightcache.api import State
from weightcache.client import acquire

START = "from weightcache.__main__ import main\nmain()\n"
# Each node by itself: who has a chunk is asked, but nobody waits for a turn.
WITHOUT_TURNS = """
from weightcache import peer_group
from weightcache.policy.ownership import Standing

def choose(me, digest, others, busy):
    return next((node for node, said in others.items() if said is Standing.READY), None)

peer_group.choose = choose
"""
# Each waits for the others as long as the test lasts: on a busy machine none takes another one for dead or hung.
PATIENT = """
from weightcache import peer_client, peer_group

peer_client.CONNECT_S = peer_client.ANSWER_S = peer_client.SILENCE_S = 120.0
peer_group.STALL_S = peer_group.PATIENCE_S = 120.0
"""
WAIT_S = 120.0


@dataclass(frozen=True)
class NodeProcess:
    """One agent."""

    process: "subprocess.Popen[str]"
    directory: SocketDirectory

    def state(self) -> State:
        return asyncio.run(state_of(self.directory))


@contextmanager
def nodes(
    root: Path, count: int, store_url: str, *, peers: bool = True, before: str = "", slabs: int = 16
) -> Iterator[list[NodeProcess]]:
    """So many agents over one store, which know one another by a list that is the same for all of them."""
    ports = free_ports(count)
    root.mkdir(exist_ok=True)
    key = root / "peers.key"
    key.write_bytes(SECRET + b"\n")
    key.chmod(0o600)
    with ExitStack() as stack:
        started = []
        for number, port in enumerate(ports):
            data = root / f"node{number}"
            env = os.environ | {
                "KELVIN_DATA": str(data), "KELVIN_STORE": store_url, "KELVIN_SLAB_BYTES": str(HUGE),
                "KELVIN_HOST_BYTES": str(slabs * HUGE), "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
                "KELVIN_HEDGE_PERCENT": "0",
            }  # fmt: skip
            if peers:
                env |= {
                    "KELVIN_PEER_LISTEN": f"{HOST}:{port}", "KELVIN_PEER_KEY": str(key),
                    "KELVIN_PEERS": ",".join(map(url_of, ports)),
                }  # fmt: skip
            directory = SocketDirectory(data / "run")
            stack.callback(directory.close)
            log = stack.enter_context((data / "log").open("w"))
            process = subprocess.Popen([sys.executable, "-c", before + START], env=env, text=True, stderr=log)
            stack.callback(_end, process)
            started.append(NodeProcess(process, directory))
        asyncio.run(_all_up(started))
        yield started


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(30)


async def _all_up(started: Sequence[NodeProcess]) -> None:
    async with asyncio.timeout(60):
        for node in started:
            while not (node.directory.path / "cache.sock").exists():
                assert node.process.poll() is None, "it did not start"
                await asyncio.sleep(0.02)
            await wait_for(node.directory, "it answers", lambda _: True)


class Waiters:
    """Threads that lease the version, one each, from the nodes in turn. All begin at once."""

    def __init__(self, started: Sequence[NodeProcess], version: Version, count: int) -> None:
        self.count = count
        self.by_tier: Counter[str] = Counter()
        self._version = version
        self._lock = threading.Lock()
        threading.stack_size(256 << 10)
        self._threads = ThreadPoolExecutor(count)
        self._outcomes: list[tuple[int, Future[bool]]] = [
            (number % len(started), self._threads.submit(self._lease, started[number % len(started)], number))
            for number in range(count)
        ]

    def _lease(self, node: NodeProcess, number: int) -> bool:
        """Whether the bytes are right: all of them for some, a page for the rest. Raises `Refused`."""
        with acquire(node.directory, TENANT, self._version.id, WAIT_S) as lease:
            with self._lock:
                self.by_tier.update(lease.bytes_by_tier)
            whole = self._version.linear
            if number % 97 == 0:
                return lease.view(0, lease.total_bytes) == whole
            at = number * 7919 * 4096 % (len(whole) - 4096)
            return lease.view(at, 4096) == whole[at : at + 4096]

    def right(self) -> Counter[int]:
        """How many got the right bytes, by node; all have ended. Refused ones are not counted."""
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
