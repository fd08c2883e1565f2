"""A process that is stopped and answers nothing any more is found, killed and replaced within half a minute."""

import signal
import socket
import time
from contextlib import closing

import psutil
import pytest

from coldstart_bench.harness.installation import Installation
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid
from kelvin.supervisor.watchdog import PROBE_INTERVAL_S, PROBE_TIMEOUT_S
from tests.e2e.commands import run
from tests.e2e.https_client import complete
from tests.e2e.installation_state import sole_replica

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

REPLACED_S = 30.0
KILLED_S = 25.0  # until the watchdog has found and killed what hangs; starts come on top
ASKED_S = PROBE_INTERVAL_S + 2 * PROBE_TIMEOUT_S  # from when a process answers until the watchdog has heard it
SERVICES = {"activator", "cache", "control", "snapshotter", "zygote"}


def _pids(kelvin: Installation) -> dict[str, int]:
    """The services that have a socket, by its name, with their processes."""
    found = {}
    with closing(SocketDirectory(kelvin.data / "run")) as directory:
        for name in SERVICES:
            kind = socket.SOCK_SEQPACKET if name == "zygote" else socket.SOCK_STREAM
            try:
                with directory.connect(f"{name}.sock", kind) as connected:
                    found[name] = peer_pid(connected)
            except OSError:
                continue  # killed, and not back yet
    return found


def _exits(kelvin: Installation) -> dict[str, int]:
    """How often each process has ended; other tests of this installation kill some."""
    return {row["name"]: row["exits"] for row in kelvin.admin.request("GET", "/admin/v1/status")["processes"]}


def _replaced(kelvin: Installation, before: dict[str, int], number: signal.Signals) -> float:
    """Send a signal to all services; return after how many seconds every one is another process."""
    began_s = time.monotonic()
    for pid in before.values():
        psutil.Process(pid).send_signal(number)

    def is_replaced() -> bool:
        now = _pids(kelvin)
        return now.keys() == SERVICES and not set(now.values()) & set(before.values())

    kelvin.wait(is_replaced, "every process is another one")
    return time.monotonic() - began_s


def test_every_hung_process_is_replaced(kelvin: Installation) -> None:
    """All services and a replica hang at once. Requests are answered again, and `kelvin status` names what hung. Where
    services that are killed outright take long to come back, the bound is KILLED_S and twice that time.
    """
    start_s = _replaced(kelvin, _pids(kelvin), signal.SIGKILL)
    kelvin.wait(lambda: complete(kelvin, "llama", "w1", max_tokens=1).status == 200, "it answers after the kills")
    before = _pids(kelvin)
    assert before.keys() == SERVICES
    row = sole_replica(kelvin, "llama")
    replica = psutil.Process(row["pid"])
    answers_s = time.monotonic()
    # One that has never answered has more time.
    kelvin.wait(lambda: time.monotonic() - answers_s > ASKED_S, "the watchdog has heard each of them")
    exits = _exits(kelvin)
    replica.send_signal(signal.SIGSTOP)
    assert _replaced(kelvin, before, signal.SIGSTOP) < max(REPLACED_S, KILLED_S + 2 * start_s)
    assert not replica.is_running()
    kelvin.wait(lambda: complete(kelvin, "llama", "w1", max_tokens=1).status == 200, "it answers again")
    told = run(kelvin, "status")
    assert told.count("killed by signal 9: it did not answer for") == len(SERVICES), told
    assert f"killed by signal 9: {row['runtime_id']}: it did not answer for" in told, told
    assert _exits(kelvin) == {name: count + 1 for name, count in exits.items()}, told
