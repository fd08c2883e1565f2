"""The demo cleans up, also when it is interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.deep
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """After an interrupt the demo exits with 130 and leaves no process and no directory."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.demo"], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    ) as demo:
        try:
            assert demo.stdout is not None
            for line in demo.stdout:
                if "Push two models" in line:
                    break
            family = psutil.Process(demo.pid).children(recursive=True)
            assert len(family) >= 5
            demo.send_signal(signal.SIGINT)
            rest, _ = demo.communicate(timeout=90)
        finally:
            demo.kill()
    assert demo.returncode == 130
    assert "interrupted; cleaned up" in rest
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert list(tmp_path.glob("kelvin-*")) == []
