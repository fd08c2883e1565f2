"""The processes that the zygote has forked for this control plane: their forks, adoptions and deaths.

A process is in the replica table and in the fleet from its fork until its pidfd says that it is dead. The fleet moves
it to parked and to ending. `local_actuator.py`, `replica_sleeper.py` and `app/push_jobs.py` make the other moves.
"""

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from controlplane import dependencies
from controlplane.clock import Clock
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.policy.replica_lifecycle import ReplicaEvent, ReplicaState
from controlplane.scaling.replicas import Replica, ReplicaTable
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.ipc.forked_process import TERM_S
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.zygote_client import PEER, ZygoteClient
from kelvin.process.loops import notify

log = logging.getLogger(__name__)

FORK_S: Final = dependencies.ZYGOTE.timeout_s
PARK_S: Final = 30.0


class Fleet:
    """Adds processes to the replica table and removes them. Not thread-safe: use from one event loop. Runtimes live on
    after `close`.
    """

    def __init__(
        self, directory: SocketDirectory, zygote: ZygoteClient, table: ReplicaTable, clock: Clock, tasks: Tasks
    ) -> None:
        self.table = table
        self.tasks = tasks
        self.clock = clock
        self._directory = directory
        self._zygote = zygote
        self._processes: dict[str, RuntimeProcess] = {}
        self._forking: set[str] = set()  # ids of forks that the zygote has not answered yet
        self._closing: set[RuntimeProcess] = set()  # processes whose connections are being closed
        self._exit_listeners: list[Callable[[Replica], None]] = []

    def __repr__(self) -> str:
        return f"<Fleet {self.table!r}>"

    def __getitem__(self, runtime_id: str) -> RuntimeProcess:
        return self._processes[runtime_id]

    def add_exit_listener(self, listener: Callable[[Replica], None]) -> None:
        """Call `listener` with the last state of each process that dies, after it has left the table."""
        self._exit_listeners.append(listener)

    async def fork_standby(self) -> RuntimeProcess:
        """Fork a standby and return it parked. Raises Refused: StartFailed if the disk is full, otherwise Unavailable
        if the zygote or the standby does not answer.
        """
        runtime_id = f"r{secrets.token_hex(6)}"
        self._forking.add(runtime_id)
        try:
            forked = await self._zygote.fork(runtime_id, FORK_S)
            process = self.adopt(Replica(runtime_id, ReplicaState.FORKED, self._now(), forked.pid), forked.pidfd)
        finally:
            self._forking.discard(runtime_id)
        limit_us = self._now() + int(PARK_S * 1e6)
        if await process.wait_parked(lambda: self._now() <= limit_us):
            self.table.apply_event(runtime_id, ReplicaEvent.PARKED, self._now())
            return process
        self.end(process)
        log.error("a standby did not park", extra={"runtime_id": runtime_id, "pid": forked.pid})
        # A standby can't report a reason before it listens, so test for its first need: room for its socket and meter
        # page.
        if await asyncio.to_thread(_is_full, self._directory.path):
            raise Refused(StartFailed("the disk of the data directory is full; free some of it"))
        raise Refused(Unavailable(PEER))

    def is_known(self, runtime_id: str) -> bool:
        """Return whether the process is in the fleet, or is being forked for it."""
        return runtime_id in self._processes or runtime_id in self._forking

    def adopt(self, replica: Replica, pidfd: int) -> RuntimeProcess:
        """Add a process that was forked for this control plane or an earlier one. The fleet now owns the pidfd."""
        self.table.add(replica)
        process = RuntimeProcess(self._directory, replica.runtime_id, replica.pid, pidfd, self._handle_exit)
        self._processes[replica.runtime_id] = process
        return process

    def end(self, process: RuntimeProcess, term_s: float = TERM_S) -> None:
        """End a process in the background: SIGTERM, later SIGKILL. Does nothing if it is ending already.

        Raises IllegalReplicaEvent for a replica that serves: drain it first.
        """
        if process.is_leaving:
            return
        self.table.apply_event(process.runtime_id, ReplicaEvent.END, self._now())
        process.is_ending = True
        self.tasks.start(process.end(term_s), f"end {process.runtime_id}")

    async def close(self) -> None:
        """Release every process without ending it."""
        for process in (*self._processes.values(), *self._closing):
            await process.close()
        self._processes.clear()
        self._closing.clear()

    def check_integrity(self) -> None:
        """Assert that table and fleet have the same processes."""
        self.table.check_integrity()
        assert {replica.runtime_id for replica in self.table} == set(self._processes)
        assert not any(process.is_gone for process in self._processes.values())

    def _handle_exit(self, process: RuntimeProcess) -> None:
        del self._processes[process.runtime_id]
        replica = self.table.remove(process.runtime_id)
        assert replica is not None
        self._closing.add(process)
        self.tasks.start(self._close_process(process), f"close {process.runtime_id}")
        if not process.is_ending and replica.state is not ReplicaState.DRAINING:  # an empty one ends by itself
            log.warning("a process died", extra={"runtime_id": process.runtime_id, "state": replica.state})
        notify(self._exit_listeners, lambda listener: listener(replica))

    async def _close_process(self, process: RuntimeProcess) -> None:
        await process.close()
        self._closing.discard(process)

    def _now(self) -> int:
        return self.clock.monotonic_us()


def _is_full(directory: Path) -> bool:
    """Return whether the disk has no room for a new file in the directory."""
    try:
        with TemporaryFile(dir=directory) as probe:
            os.posix_fallocate(probe.fileno(), 0, 4096)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False
