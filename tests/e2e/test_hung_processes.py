"""A process that is stopped and answers nothing any more is found, killed and replaced within half a minute."""

import signal
import socket
import time
from contextlib import closing

import psutil
import pytest

from coldstart_bench.installation import Installation
from kelvin.supervisor.watchdog import ANSWER_S, LOOK_S
from service.unix import SocketDirectory, peer_pid
from tests.e2e.calls import complete
from tests.e2e.commands import run
from tests.e2e.inside import sole_replica

pytestmark = pytest.mark.deep

REPLACED_S = 30.0
ASKED_S = LOOK_S + 2 * ANSWER_S  # from a process's birth until the watchdog has asked it
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


def test_every_hung_process_is_replaced(kelvin: Installation) -> None:
    """All services and a replica hang at once. Requests are answered again, and `kelvin status` names what hung."""
    assert complete(kelvin, "llama", "w1", max_tokens=1).status == 200
    before = _pids(kelvin)
    assert before.keys() == SERVICES
    row = sole_replica(kelvin, "llama")
    replica = psutil.Process(row["pid"])
    # One that has never answered has more time.
    kelvin.wait(lambda: time.time() - replica.create_time() > ASKED_S, "the watchdog has asked the replica")
    exits = _exits(kelvin)
    for pid in (*before.values(), replica.pid):
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    began_s = time.monotonic()

    def is_replaced() -> bool:
        now = _pids(kelvin)
        return now.keys() == SERVICES and not set(now.values()) & set(before.values())

    kelvin.wait(is_replaced, "every process is another one")
    assert time.monotonic() - began_s < REPLACED_S
    assert not replica.is_running()
    kelvin.wait(lambda: complete(kelvin, "llama", "w1", max_tokens=1).status == 200, "it answers again")
    told = run(kelvin, "status")
    assert told.count("killed by signal 9: it did not answer for") == len(SERVICES), told
    assert f"killed by signal 9: {row['runtime_id']}: it did not answer for" in told, told
    assert _exits(kelvin) == {name: count + 1 for name, count in exits.items()}, told
