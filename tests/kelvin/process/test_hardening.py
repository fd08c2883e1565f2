"""A process with secrets in memory leaves no core dump, and its data directory is private."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kelvin.process.hardening import make_private

ROOT = Path(__file__).parents[3]
ABORTS = """
import ctypes, os, signal, sys
from kelvin.process.hardening import protect_memory
if sys.argv[1] == "kept":
    protect_memory()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)  # PR_GET_DUMPABLE
os.kill(os.getpid(), signal.SIGABRT)
"""


def _allow_cores() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def _aborted(which: str, where: Path) -> tuple[str, list[str]]:
    """Return the process's dumpable flag and the files that its abort left in `where`."""
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


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o2770])
def test_directory_of_ours_is_closed_to_others(mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The owner's permissions stay, and the change is logged once."""
    tmp_path.chmod(mode)
    assert make_private(tmp_path)
    assert make_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o077 == 0
    assert tmp_path.stat().st_mode & 0o700 == mode & 0o700
    assert [record.message for record in caplog.records] == ["the data directory was open to others"]


@pytest.mark.parametrize(("mode", "is_private"), [(0o755, False), (0o700, True)])
def test_directory_of_another_user_stays_as_it_is(
    mode: int, is_private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result says whether it is private."""
    tmp_path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert make_private(tmp_path) is is_private
    assert tmp_path.stat().st_mode & 0o777 == mode


def test_protected_process_leaves_no_core(tmp_path: Path) -> None:
    """No core is written even if the limits allow one."""
    assert _aborted("kept", tmp_path) == ("0", [])


def test_unprotected_process_leaves_a_core(tmp_path: Path) -> None:
    """Negative control: without protection, the same process writes a core."""
    dumpable, left = _aborted("plain", tmp_path)
    assert dumpable == "1"
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith(("|", "/")) or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("cores of this machine go elsewhere")
    assert any(name.startswith("core") for name in left)
