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


def test_standby_has_its_own_session_and_descriptors(installation: Installation) -> None:
    """A standby has its own session, is adopted by the caller, and has only known descriptors."""
    standby = installation.fork()
    report = standby.report()
    assert (report.pid, report.runtime_id, report.state.value) == (standby.pid, standby.runtime_id, "standby")
    status = standby.status()
    assert int(status["PPid"]) == os.getpid()
    assert os.getsid(standby.pid) == standby.pid
    assert int(status["SigBlk"], 16) == 0
    own = {"/dev/null", str(installation.data / "log"), str(installation.data / "run"), os.readlink("/proc/self/fd/1")}
    own.add(str(installation.data / "run" / "meters" / f"{standby.pid}.{standby.runtime_id}"))
    kinds = [target.split(":")[0] for target in standby.fds().values() if target not in own]
    assert set(kinds) <= {"anon_inode", "pipe", "socket"}
    assert len(kinds) <= 16
    standby.kill(signal.SIGTERM)
    assert standby.reap() == 0
    assert not (installation.data / "run" / f"rt-{standby.runtime_id}.sock").exists()


@pytest.mark.deep
def test_standbys_share_no_descriptors(installation: Installation) -> None:
    """A second standby has no more descriptors than the first, and neither keeps the zygote's socket."""
    first, second = installation.fork(), installation.fork()
    poll_until("they hold as many descriptors", lambda: len(second.fds()) == len(first.fds()) or None)
    zygote_sockets = {target for target in _fds(installation.zygote.pid).values() if target.startswith("socket:")}
    for standby in (first, second):
        assert not zygote_sockets & set(standby.fds().values())
        standby.kill(signal.SIGKILL)
        assert standby.reap() == -9


def _fds(pid: int) -> dict[int, str]:
    listing = Path(f"/proc/{pid}/fd")
    return {int(each.name): os.readlink(each) for each in listing.iterdir()}


def test_forks_leak_nothing_in_the_zygote(installation: Installation) -> None:
    """After several forks the zygote has one thread, no child, and its former descriptors."""
    before = len(_fds(installation.zygote.pid))
    standbys = [installation.fork() for _ in range(4)]
    for standby in standbys:
        standby.kill(signal.SIGKILL)
        assert standby.reap() == -9
    poll_until("its connections are closed", lambda: len(_fds(installation.zygote.pid)) <= before or None)
    assert installation.ask_zygote({"op": "ping"})[0] == {"ok": True, "threads": 1}
    children = Path(f"/proc/{installation.zygote.pid}/task/{installation.zygote.pid}/children").read_text()
    assert children == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(b"{", "message=(JSON)", id="no JSON"),
        pytest.param({"op": "spawn"}, "Invalid value 'spawn'", id="an unknown operation"),
        pytest.param({"op": "fork"}, "missing required field `runtime_id`", id="no runtime id"),
        pytest.param({"op": "fork", "runtime_id": "../x"}, "must be a DNS label", id="a runtime id that is a path"),
        pytest.param({"op": "ping", "more": 1}, "unknown field `more`", id="an unknown field"),
    ],
)
def test_a_wrong_message_is_answered_with_the_reason(installation: Installation, message: object, words: str) -> None:
    """A malformed message is refused with the reason, and the zygote lives on."""
    reply, fds = installation.ask_zygote(message)
    assert (reply["ok"], fds) == (False, [])
    assert words in reply["failure"]["message"]
    assert installation.ask_zygote({"op": "ping"})[0]["ok"]


def test_zygote_bounds_its_connections(installation: Installation) -> None:
    """Connections above the limit are refused, and a client that leaves early harms no other."""
    connections = [installation.directory.connect("zygote.sock", socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS)]
    try:
        with installation.directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as surplus_client:
            assert json.loads(surplus_client.recv(4096))["failure"]["code"] == "overloaded"
            assert surplus_client.recv(4096) == b""
        connections[0].send(b'{"op":"ping"}')
        assert json.loads(connections[0].recv(4096))["ok"], "open connections are served"
        connections[1].send(b'{"op":"ping"}')
        connections[1].close()
    finally:
        for each in connections:
            each.close()

    def pinged() -> bool | None:
        try:
            return installation.ask_zygote({"op": "ping"})[0]["ok"] or None
        except ConnectionError:
            return None  # refused before it was read

    poll_until("a connection is accepted again", pinged)


def test_zygote_without_descriptors_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without descriptors the zygote retries its accept with pauses and fewer and fewer log lines, then serves."""
    accept, enough = socket.socket.accept, threading.Event()
    attempts_s: list[float] = []

    def exhausted(sock: socket.socket) -> object:
        if enough.is_set():
            return accept(sock)
        attempts_s.append(time.monotonic())
        if len(attempts_s) > 3:
            enough.set()
        raise OSError(errno.EMFILE, "too many open files")

    def no_descriptor() -> object:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    directory = SocketDirectory(tmp_path)
    stop_reader, stop_writer = socket.socketpair()
    with (
        ThreadPoolExecutor(1) as threads,
        stop_reader,
        directory.listen("zygote.sock", socket.SOCK_SEQPACKET) as listener,
    ):
        serving = threads.submit(Zygote(listener, (stop_reader.fileno(),)).serve)
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
                assert json.loads(client.recv(4096))["ok"], "the zygote still serves"
        finally:
            stop_writer.close()
            assert serving.result(DEADLINE_S) is None
    directory.close()
    assert all(later - earlier > ACCEPT_PAUSE_S / 2 for earlier, later in pairwise(attempts_s))
    assert [getattr(each, "failures", 0) for each in caplog.records if each.message == "accept failed"] == [1, 2, 4]


def test_fork_for_a_gone_client_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork whose client left is killed, because no other process knows of it."""
    directory, child = SocketDirectory(tmp_path), subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(zygote, "fork_detached", lambda: ForkedProcess(child.pid, os.pidfd_open(child.pid)))
    stop_reader, stop_writer = socket.socketpair()
    with (
        ThreadPoolExecutor(1) as threads,
        stop_reader,
        directory.listen("zygote.sock", socket.SOCK_SEQPACKET) as listener,
    ):
        with directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as gone_client:
            gone_client.send(b'{"op":"fork","runtime_id":"late"}')
        serving = threads.submit(Zygote(listener, (stop_reader.fileno(),)).serve)
        try:
            assert child.wait(10) == -signal.SIGKILL
            with directory.connect("zygote.sock", socket.SOCK_SEQPACKET) as client:
                client.settimeout(DEADLINE_S)
                client.send(b'{"op":"ping"}')
                assert json.loads(client.recv(4096))["ok"], "the zygote still serves"
        finally:
            stop_writer.close()
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
standby = zygote.run(read_settings(os.environ))
if standby is not None:
    os._exit(0)
print("ended well")
"""


@pytest.mark.parametrize("stop", ["lifeline", "SIGTERM", "SIGINT"])
def test_zygote_ends_on_a_signal_or_without_supervisor(tmp_path: Path, stop: str) -> None:
    """The zygote exits with 0 after a signal, and when its supervisor is gone."""
    reader, writer = os.pipe()
    env = os.environ | {"KELVIN_DATA": str(tmp_path), "KELVIN_LIFELINE_FD": str(reader)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], env=env, cwd=ROOT, pass_fds=[reader], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    os.close(reader)
    try:
        poll_until("it listens", lambda: (tmp_path / "run" / "zygote.sock").exists() or None)
        if stop != "lifeline":
            process.send_signal(signal.Signals[stop])
        else:
            os.close(writer)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, output) == (0, "ended well\n")
    finally:
        process.kill()
        process.wait()
        if stop != "lifeline":
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


def test_fork_with_a_second_thread_is_refused() -> None:
    """Threads are counted by the kernel, so threads of libraries count. Without the thread, a fork works."""
    output = _run("""
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
    assert output.splitlines() == ["conflict fork: this process has 2 threads, and must have 1", "forked True"]


def test_forked_process_belongs_to_the_subreaper() -> None:
    """The intermediate process is reaped, the orphan belongs to the subreaper, and its pidfd ends with it."""
    output = _run("""
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
    assert output.splitlines() == ["True", "True 7", "no child is left", "False"]


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
        pytest.param("os.pidfd_open = lambda pid: 1 / 0", id="the child's pidfd cannot be opened"),
        pytest.param(
            "fork, first = os.fork, [True]\n"
            "os.fork = lambda: fork() if first and first.pop() else (_ for _ in ()).throw(OSError())",
            id="the second fork fails",
        ),
        pytest.param(
            "import socket, time\n"
            "from runtime.app import zygote\n"
            "zygote.FORK_TIMEOUT_S = 0.2\n"
            "socket.send_fds = lambda *_: time.sleep(60)",
            id="the child is reported too late",
        ),
    ],
)
def test_failed_fork_leaves_no_process(fault: str) -> None:
    """After a failed fork no unknown process lives on, and the zygote can fork again."""
    output = _run(f"""
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
    first, *orphans, last = output.splitlines()
    assert first == "internal"
    assert set(orphans) <= {"-9", "1"}, "killed, or ended because the zygote gave up"
    assert last == "False True"
