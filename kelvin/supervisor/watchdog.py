"""Kill hung processes. The supervisor restarts them as after any death.

Every process is probed over its socket: GET `/healthz`, or a ping for the zygote. This finds processes that are
stopped, deadlocked, or block their event loop. `supervisor/restart_policy.py` has the rule. An engine's thread is
watched by its own process: see `runtime/lifecycle/replica.py`.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid
from kelvin.ipc.zygote_client import ZygoteClient
from kelvin.supervisor.restart_policy import START_S, SilenceTimer

log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 3.0
PROBE_TIMEOUT_S: Final = 3.0
READY_S: Final = 2.0  # time limit of a readiness probe
CONNECT_S: Final = 0.2  # connecting within one machine is instant, unless the backlog is full


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A process to probe. `socket` is its name in the run directory, or None for the zygote. `has_answered`: it has
    answered some call already, so it gets no extra time to start.
    """

    name: str
    pid: int
    socket: str | None
    has_answered: bool = False


class Watchdog:
    """Probes all processes, PROBE_INTERVAL_S after the last round ended. Start `run` as a loop."""

    def __init__(
        self,
        watched: Callable[[], Collection[WatchedProcess]],
        answers: Callable[[WatchedProcess], Awaitable[bool]],
        on_kill: Callable[[WatchedProcess, str], None] = lambda hung, why: None,
        start_s: float = START_S,
    ) -> None:
        """`watched` returns children that were not reaped yet, so no other process can have their pids.

        `answers` probes one of them within PROBE_TIMEOUT_S plus the time to connect. `on_kill` gets each process before
        it is killed, and the reason. A process has `start_s` for its first answer.
        """
        self._watched = watched
        self._answers = answers
        self._on_kill = on_kill
        self._start_s = start_s
        self._silences: dict[WatchedProcess, SilenceTimer] = {}

    def __repr__(self) -> str:
        silent = [each.name for each, silence in self._silences.items() if silence.silent_s]
        return f"<Watchdog of {len(self._silences)}, silent: {silent}>"

    async def run(self) -> None:
        """Probe and judge all processes, until cancelled."""
        now_s = asyncio.get_running_loop().time
        last_s = now_s()
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            watched = self._watched()
            answers = await asyncio.gather(*(self._answers(each) for each in watched))
            self._judge(dict(zip(watched, answers, strict=True)), now_s() - last_s)
            last_s = now_s()

    def _judge(self, answers: dict[WatchedProcess, bool], probe_s: float) -> None:
        before, self._silences = self._silences, {}
        alive = set(self._watched())  # some may have died and been restarted, with another pid, during the probes
        for each in alive & answers.keys():
            silence = before.get(each, SilenceTimer(each.has_answered)).after_probe(answers[each], probe_s)
            if silence.is_hung(self._start_s):
                why = f"it did not answer for {silence.silent_s:.0f} s"
                log.error("a process hangs and is killed", extra={"child": each.name, "pid": each.pid, "why": why})
                self._on_kill(each, why)
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            else:
                self._silences[each] = silence


async def is_ready(directory: SocketDirectory, name: str, socket_name: str | None) -> bool:
    """Return whether a process is ready. The zygote is ready if it answers."""
    try:
        await _probe(directory, name, socket_name, "/readyz", READY_S)
        return True
    except Refused:
        return False


def make_socket_probe(directory: SocketDirectory) -> Callable[[WatchedProcess], Awaitable[bool]]:
    """Return a probe that calls processes over their sockets in `directory`."""

    async def answers(each: WatchedProcess) -> bool:
        try:
            await _probe(directory, each.name, each.socket, "/healthz", PROBE_TIMEOUT_S)
            return True
        except Refused as refused:
            # Any other failure is an answer. If this process can't make a socket, or another process has the name,
            # silence says nothing about the probed process.
            return (
                not isinstance(refused.failure, Unavailable)
                or not _can_make_socket()
                or _is_held_by_other_process(directory, each)
            )

    return answers


async def _probe(directory: SocketDirectory, name: str, socket_name: str | None, path: str, timeout_s: float) -> None:
    """GET `path` over the socket, or ping the zygote, which has no paths. Raises Refused."""
    if socket_name is None:
        await ZygoteClient(directory).ping(timeout_s)
        return
    client = ServiceClient(directory, socket_name, name, limit=1)
    try:
        async with client.open("GET", path, timeout_s=timeout_s):
            return
    finally:
        await client.close()


def _can_make_socket() -> bool:
    """Return whether this process can make a socket. It may have reached its limit of open files."""
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return False
    return True


def _is_held_by_other_process(directory: SocketDirectory, each: WatchedProcess) -> bool:
    """Return whether another process has the socket's name, as a new activator does before the old one ends."""
    return each.socket is not None and listener_pid(directory, each.socket) not in (None, each.pid)


def listener_pid(directory: SocketDirectory, name: str) -> int | None:
    """Return the process that listens on a socket. None if there is none, or its backlog is full."""
    try:
        with directory.connect(name, timeout_s=CONNECT_S) as connected:
            return peer_pid(connected)
    except OSError:
        return None
