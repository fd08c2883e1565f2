"""A cell is red if its installation hangs, or dies without an error message. The group goes on with the next cell."""

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from coldstart_bench.harness import installation as harness
from tests.drills.damage_drill import _refused
from tests.drills.drill_installation import DrillInstallation
from tests.drills.matrix import StartOutcome
from tests.drills.stage_drill import run_cell

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"


def test_an_installation_that_does_not_end_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging installation is a result of a drill, not an error of the drill."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(harness, "END_S", 1.0)
    installation = DrillInstallation(tmp_path / "data", program="stubborn")
    installation.begin()
    assert installation._process is not None
    try:
        assert installation._process.ready_line() == "1\n"
        installation._process.send(signal.SIGTERM)
        result = run_cell("x", cast(Any, lambda: (None, [str(installation.wait_exit())])))
    finally:
        installation.abandon()
    assert result.wrong == ("InstallationFailed: kelvin up did not end within 1 s",)


def test_start_that_dies_without_a_message_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with a damaged file that was killed has not refused it."""
    (tmp_path / "silent.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    installation = DrillInstallation(tmp_path / "data", program="silent")
    installation.begin()
    try:
        assert not installation.wait_ready()
        assert _refused(installation, "ca.pem") == (StartOutcome.REFUSED, ["`kelvin up` ended with -9: "])
    finally:
        installation.abandon()


def test_the_bill_is_of_the_installations_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its clock is ahead, the command gets the month. By default it would use this process's month."""
    commands: list[tuple[str, ...]] = []

    def kelvin(self: DrillInstallation, *words: str) -> tuple[int, str, str]:
        commands.append(words)
        return 0, '{"balance": {"problems": []}}', ""

    monkeypatch.setattr(DrillInstallation, "kelvin", kelvin)
    monkeypatch.setattr(DrillInstallation, "month", "2031-05")
    assert DrillInstallation(tmp_path / "data").balance_problems() == []
    assert commands[0][-2:] == ("--month", "2031-05")
