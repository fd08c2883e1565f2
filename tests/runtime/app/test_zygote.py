"""The zygote forks standbys, reports failures, and ends on a signal or without its supervisor."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from kelvin.contracts.errors import Internal
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.app import zygote
from runtime.app.zygote import ACCEPT_PAUSE_S, MAX_CONNECTIONS, ForkedProcess, Zygote
from tests.runtime.processes import DEADLINE_S, Installation, poll_until

ROOT = Path(__file__).parents[3]


def test_a_standby_is_a_process_of_its_own(house: Installation) -> None:
    """A standby has its own session, is adopted by the caller, and has only known descriptors."""
    born = house.fork()
    report = born.report()
    assert (report.pid, report.runtime_id, report.state.value) == (born.pid, born.runtime_id, "standby")
    status = born.status()
    assert int(status["PPid"]) == os.getpid()
    assert os.getsid(born.pid) == born.pid
    assert int(status["SigBlk"], 16) == 0
    own = {"/dev/null", str(house.data / "log"), str(house.data / "run"), os.readlink("/proc/self/fd/1")}
    own.add(str(house.data / "run" / "meters" / f"{born.pid}.{born.runtime_id}"))
    kinds = [target.split(":")[0] for target in born.fds().values() if target not in own]
    assert set(kinds) <= {"anon_inode", "pipe", "socket"}
    assert len(kinds) <= 16
    born.kill(signal.SIGTERM)
    assert born.reap() == 0
    assert not (house.data / "run" / f"rt-{born.runtime_id}.sock").exists()


@pytest.mark.deep
def test_standbys_hold_nothing_of_one_another(house: Installation) -> None:
    """A second standby has no more descriptors than the first, and neither keeps the zygote's socket."""
    first, second = house.fork(), house.fork()
    poll_until("they hold as much", lambda: len(second.fds()) == len(first.fds()) or None)
    zygote_sockets = {target for target in _fds(house.zygote.pid).values() if target.startswith("socket:")}
    for born in (first, second):
        assert not zygote_sockets & set(born.fds().values())
        born.kill(signal.SIGKILL)
        assert born.reap() == -9


def _fds(pid: int) -> dict[int, str]:
    listing = Path(f"/proc/{pid}/fd")
    return {int(each.name): os.readlink(each) for each in listing.iterdir()}


def test_births_leak_nothing_in_the_zygote(house: Installation) -> None:
    """After several forks the zygote has one thread, no child, and its former descriptors."""
    before = len(_fds(house.zygote.pid))
    births = [house.fork() for _ in range(4)]
    for born in births:
        born.kill(signal.SIGKILL)
        assert born.reap() == -9
    poll_until("its connections are closed", lambda: len(_fds(house.zygote.pid)) <= before or None)
    assert house.ask_zygote({"op": "ping"})[0] == {"ok": True, "threads": 1}
    children = Path(f"/proc/{house.zygote.pid}/task/{house.zygote.pid}/children").read_text()
    assert children == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(b"{", "message=(JSON)", id="no JSON"),
        pytest.param({"op": "spawn"}, "Invalid value 'spawn'", id="an unknown wish"),
        pytest.param({"op": "fork"}, "missing required field `runtime_id`", id="no name"),
        pytest.param({"op": "fork", "runtime_id": "../x"}, "must be a DNS label", id="a name that is a path"),
        pytest.param({"op": "ping", "more": 1}, "unknown field `more`", id="a field too many"),
    ],
)
def test_a_wrong_message_is_answered_with_the_reason(house: Installation, message: object, words: str) -> None:
    """A malformed message is refused with the reason, and the zygote lives on."""
    reply, fds = house.ask_zygote(message)
    assert (reply["ok"], fds) == (False, [])
    assert words in reply["failure"]["message"]
    assert house.ask_zygote({"op": "ping"})[0]["ok"]


def test_connections_are_bounded_and_the_rude_are_dropped(house: Installation) -> None:
    """Connections above the limit are refused, and one that leaves early harms no other."""
    kept = [house.directory.connect("zygote.sock", socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS)]
    try:
        with house.directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as surplus:
            assert json.loads(surplus.recv(4096))["failure"]["code"] == "overloaded"
            assert surplus.recv(4096) == b""
        kept[0].send(b'{"op":"ping"}')
        assert json.loads(kept[0].recv(4096))["ok"], "those inside are served"
        kept[1].send(b'{"op":"ping"}')
        kept[1].close()
    finally:
        for each in kept:
            each.close()

    def pinged() -> bool | None:
        try:
            return house.ask_zygote({"op": "ping"})[0]["ok"] or None
        except ConnectionError:
            return None  # refused before it was read

    poll_until("there is room again", pinged)


def test_want_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without descriptors the zygote retries its accept with pauses and fewer and fewer log lines, then serves."""
    accept, enough = socket.socket.accept, threading.Event()
    tried: list[float] = []

    def exhausted(sock: socket.socket) -> object:
        if enough.is_set():
            return accept(sock)
        tried.append(time.monotonic())
        if len(tried) > 3:
            enough.set()
        raise OSError(errno.EMFILE, "too many open files")

    def no_descriptor() -> object:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    directory = SocketDirectory(tmp_path)
    ending, end = socket.socketpair()
    with ThreadPoolExecutor(1) as threads, ending, directory.listen("zygote.sock", socket.SOCK_SEQPACKET) as listener:
        serving = threads.submit(Zygote(listener, (ending.fileno(),)).serve)
        try:
            with directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as client:
                client.settimeout(DEADLINE_S)
                client.send(b'{"op":"ping"}')
                assert json.loads(client.recv(4096))["ok"]
                monkeypatch.setattr(zygote, "count_threads", no_descriptor)
                client.send(b'{"op":"ping"}')
                assert json.loads(client.recv(4096))["failure"]["code"] == Internal.code
                monkeypatch.undo()
                client.send(b'{"op":"ping"}')
                assert json.loads(client.recv(4096))["ok"], "it lives on"
        finally:
            end.close()
            assert serving.result(DEADLINE_S) is None
    directory.close()
    assert all(later - earlier > ACCEPT_PAUSE_S / 2 for earlier, later in pairwise(tried))
    assert [getattr(each, "failures", 0) for each in caplog.records if each.message == "accept failed"] == [1, 2, 4]


def test_process_is_killed_when_its_asker_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork whose client left is killed, because no other process knows of it."""
    directory, child = SocketDirectory(tmp_path), subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(zygote, "fork_detached", lambda: ForkedProcess(child.pid, os.pidfd_open(child.pid)))
    ending, end = socket.socketpair()
    with ThreadPoolExecutor(1) as threads, ending, directory.listen("zygote.sock", socket.SOCK_SEQPACKET) as listener:
        with directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as impatient:
            impatient.send(b'{"op":"fork","runtime_id":"late"}')
        serving = threads.submit(Zygote(listener, (ending.fileno(),)).serve)
        try:
            assert child.wait(10) == -signal.SIGKILL
            with directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as client:
                client.settimeout(DEADLINE_S)
                client.send(b'{"op":"ping"}')
                assert json.loads(client.recv(4096))["ok"], "it lives on"
        finally:
            end.close()
            child.kill()
            child.wait()
            assert serving.result(DEADLINE_S) is None
    directory.close()


SERVE = """
import os, sys
from pathlib import Path
from runtime.app import zygote
from runtime.app.settings import read_settings
from kelvin.process.log import configure_logging
configure_logging("zygote")
born = zygote.run(read_settings(os.environ))
if born is not None:
    os._exit(0)
print("ended well")
"""


@pytest.mark.parametrize("how", ["lifeline", "SIGTERM", "SIGINT"])
def test_zygote_ends_on_a_signal_or_without_supervisor(tmp_path: Path, how: str) -> None:
    """The zygote exits with 0 after a signal, and when its supervisor is gone."""
    reader, writer = os.pipe()
    env = os.environ | {"KELVIN_DATA": str(tmp_path), "KELVIN_LIFELINE_FD": str(reader)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], env=env, cwd=ROOT, pass_fds=[reader], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    os.close(reader)
    try:
        poll_until("it listens", lambda: (tmp_path / "run" / "zygote.sock").exists() or None)
        if how != "lifeline":
            process.send_signal(signal.Signals[how])
        else:
            os.close(writer)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, said) == (0, "ended well\n")
    finally:
        process.kill()
        process.wait()
        if how != "lifeline":
            os.close(writer)


PREAMBLE = """
import os, select, signal, sys, threading
from kelvin.contracts.errors import Refused
from runtime.app.zygote import count_threads, fork_detached
"""


def _run(script: str) -> str:
    """Run the script in its own process, because this one has threads."""
    command = [sys.executable, "-c", PREAMBLE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_planted_thread_is_an_error_and_not_a_hang() -> None:
    """Threads are counted by the kernel, so threads of libraries count. Without the thread, a fork works."""
    said = _run("""
release = threading.Event()
thread = threading.Thread(target=release.wait)
thread.start()
try:
    fork_detached()
except Refused as refused:
    print(refused.failure.code, refused.failure.message)
release.set()
thread.join()
while count_threads() > 1:  # Python lets go of a thread a moment before the kernel does
    os.sched_yield()
orphan = fork_detached()
if orphan is None:
    os._exit(0)
print("forked", orphan.pid > 0)
""")
    assert said.splitlines() == ["conflict fork: this process has 2 threads, and must have 1", "forked True"]


def test_an_orphan_is_its_reapers_child_and_in_between_nothing_stays() -> None:
    """The intermediate process is reaped, the orphan belongs to the subreaper, and its pidfd ends with it."""
    said = _run("""
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
orphan = fork_detached()
if orphan is None:
    print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
    os._exit(7)
assert select.select([orphan.pidfd], [], [], 30)[0]
pid, status = os.waitpid(-1, 0)
print(pid == orphan.pid, os.waitstatus_to_exitcode(status))
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
""")
    assert said.splitlines() == ["True", "True 7", "no child is left", "False"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            "import resource\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
            id="no descriptor is left to count threads with",
        ),
        pytest.param(
            "import resource\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
            id="one descriptor is left, and a pair of sockets needs two",
        ),
        pytest.param("os.pidfd_open = lambda pid: 1 / 0", id="a birth that cannot be told of is undone"),
        pytest.param(
            "fork, first = os.fork, [True]\n"
            "os.fork = lambda: fork() if first and first.pop() else (_ for _ in ()).throw(OSError())",
            id="a second fork that fails",
        ),
        pytest.param(
            "import socket, time\n"
            "from runtime.app import zygote\n"
            "zygote.FORK_TIMEOUT_S = 0.2\n"
            "socket.send_fds = lambda *_: time.sleep(60)",
            id="a birth that is told of too late",
        ),
    ],
)
def test_a_birth_that_fails_is_an_error_and_leaves_nothing(fault: str) -> None:
    """After a failed fork no unknown process lives on, and the zygote can fork again."""
    said = _run(f"""
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
{fault}
try:
    if fork_detached() is None:
        signal.pause()
except Refused as refused:
    print(refused.failure.code)
if "resource" in globals():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
while True:
    try:
        _, status = os.waitpid(-1, 0)
    except ChildProcessError:
        break
    print(os.waitstatus_to_exitcode(status))
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), len(os.listdir("/proc/self/fd")) <= 5)
""")
    first, *orphans, last = said.splitlines()
    assert first == "internal"
    assert set(orphans) <= {"-9", "1"}, "killed, or ended because the zygote gave up"
    assert last == "False True"
