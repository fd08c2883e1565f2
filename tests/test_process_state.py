"""`stop` returns once a real process is stopped, or raises if it has ended."""

import os
import signal
import subprocess
import sys

import pytest

from tests.process_state import has_ended, is_stopped, stop


def test_stop_returns_for_an_ended_process() -> None:
    """`stop` raises for an ended process, reaped or not. A living one is stopped (the control)."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stop(process.pid)
        assert is_stopped(process.pid)
        assert not has_ended(process.pid)
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        stop(process.pid)
    assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        stop(process.pid)
    assert process.stdin is not None
    process.stdin.close()
