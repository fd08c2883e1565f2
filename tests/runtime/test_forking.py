"""A process with more than one thread is never forked; an orphan is its reaper's, and its pidfd names it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import os, select, signal, sys, threading
from contracts.errors import Refused
from runtime.zygote import count_threads, fork_orphan
"""


def _run(script: str) -> str:
    """In a process of its own: this one has threads."""
    command = [sys.executable, "-c", PREAMBLE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_planted_thread_is_an_error_and_not_a_hang() -> None:
    """The count is the kernel's, so that threads of libraries count as well; without it forking works again."""
    said = _run("""
release = threading.Event()
thread = threading.Thread(target=release.wait)
thread.start()
try:
    fork_orphan()
except Refused as refused:
    print(refused.failure.code, refused.failure.message)
release.set()
thread.join()
while count_threads() > 1:  # Python lets go of a thread a moment before the kernel does
    os.sched_yield()
orphan = fork_orphan()
if orphan is None:
    os._exit(0)
print("forked", orphan.pid > 0)
""")
    assert said.splitlines() == ["conflict fork: this process has 2 threads, and must have 1", "forked True"]


def test_an_orphan_is_its_reapers_child_and_in_between_nothing_stays() -> None:
    """The process between is reaped at once; the orphan is the subreaper's; its pidfd ends with it."""
    said = _run("""
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
orphan = fork_orphan()
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
    ],
)
def test_a_birth_that_fails_is_an_error_and_leaves_nothing(fault: str) -> None:
    """No process lives on that nobody knows of, and the caller can try again."""
    said = _run(f"""
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
{fault}
try:
    if fork_orphan() is None:
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
    assert set(orphans) <= {"-9"}
    assert last == "False True"
