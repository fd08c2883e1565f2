"""A process that keeps secrets leaves no core, and says so to the kernel before it sees one."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABORTS = """
import ctypes, os, signal, sys
from service.private import keep_secrets
if sys.argv[1] == "kept":
    keep_secrets()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)  # PR_GET_DUMPABLE
os.kill(os.getpid(), signal.SIGABRT)
"""


def _allow_cores() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def _aborted(which: str, where: Path) -> tuple[str, list[str]]:
    """What the kernel says of it, and the files that its death left in its directory."""
    done = subprocess.run(
        [sys.executable, "-c", ABORTS, which],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_allow_cores,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    return done.stdout.strip(), [path.name for path in where.iterdir()]


def test_it_leaves_no_core(tmp_path: Path) -> None:
    """Even where its limits allow one."""
    assert _aborted("kept", tmp_path) == ("0", [])


def test_without_it_there_would_be_one(tmp_path: Path) -> None:
    """Negative control."""
    dumpable, left = _aborted("plain", tmp_path)
    assert dumpable == "1"
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith(("|", "/")) or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("cores of this machine go elsewhere")
    assert any(name.startswith("core") for name in left)
