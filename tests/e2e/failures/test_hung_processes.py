"""A stopped process that answers no probe is killed and replaced within half a minute."""

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
KILLED_S = 25.0  # until the watchdog has killed a hung process, without the start of the next
ASKED_S = PROBE_INTERVAL_S + 2 * PROBE_TIMEOUT_S  # from a process's first answer until the watchdog has probed it
SERVICES = {"activator", "cache", "control", "snapshotter", "zygote"}


def _pids(kelvin: Installation) -> dict[str, int]:
    """Return the process ids of services by the names of their sockets."""
    found = {}
    with closing(SocketDirectory(kelvin.data / "run")) as directory:
        for name in SERVICES:
            kind = socket.SOCK_SEQPACKET if name == "zygote" else socket.SOCK_STREAM
            try:
                with directory.connect(f"{name}.sock", kind) as connected:
                    found[name] = peer_pid(connected)
            except OSError:
                continue  # killed and not yet replaced
    return found


def _exits(kelvin: Installation) -> dict[str, int]:
    """Return how often each process has exited. Other tests of this installation kill some."""
    return {row["name"]: row["exits"] for row in kelvin.admin.request("GET", "/admin/v1/status")["processes"]}


def _replaced(kelvin: Installation, before: dict[str, int], number: signal.Signals) -> float:
    """Signal all services. Return the seconds until each is another process."""
    began_s = time.monotonic()
    for pid in before.values():
        psutil.Process(pid).send_signal(number)

    def is_replaced() -> bool:
        now = _pids(kelvin)
        return now.keys() == SERVICES and not set(now.values()) & set(before.values())

    kelvin.wait(is_replaced, "every process is another one")
    return time.monotonic() - began_s


def test_every_hung_process_is_replaced(kelvin: Installation) -> None:
    """When all services and a replica hang, all are replaced, requests succeed, and `kelvin status` names them.
    If killed services start slowly here, the limit is KILLED_S plus twice that time.
    """
    start_s = _replaced(kelvin, _pids(kelvin), signal.SIGKILL)
    kelvin.wait(lambda: complete(kelvin, "llama", "w1", max_tokens=1).status == 200, "it answers after the kills")
    before = _pids(kelvin)
    assert before.keys() == SERVICES
    row = sole_replica(kelvin, "llama")
    replica = psutil.Process(row["pid"])
    answers_s = time.monotonic()
    # A process that has never answered a probe gets more time.
    kelvin.wait(lambda: time.monotonic() - answers_s > ASKED_S, "the watchdog has heard each of them")
    exits = _exits(kelvin)
    replica.send_signal(signal.SIGSTOP)
    assert _replaced(kelvin, before, signal.SIGSTOP) < max(REPLACED_S, KILLED_S + 2 * start_s)
    assert not replica.is_running()
    kelvin.wait(lambda: complete(kelvin, "llama", "w1", max_tokens=1).status == 200, "it answers again")
    status = run(kelvin, "status")
    assert status.count("killed by signal 9: it did not answer for") == len(SERVICES), status
    assert f"killed by signal 9: {row['runtime_id']}: it did not answer for" in status, status
    assert _exits(kelvin) == {name: count + 1 for name, count in exits.items()}, status
