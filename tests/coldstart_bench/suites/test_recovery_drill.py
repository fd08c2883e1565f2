"""A recovery drill fails if it lost more, or took longer, than stated."""

from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.suites import recovery_drill
from coldstart_bench.suites.recovery_drill import STATED, DrillFigures, RecoveryCase, judge, table

FINE: dict[str, Any] = {
    "lost": "the database",
    "exposed_s": 0.1,
    "registry_age_s": 68.0,
    "answered": 23,
    "billed": 23,
    "tokens_answered": 184,
    "tokens_billed": 184,
    "restore_s": 1.0,
    "ready_s": 1800.0,
    "answer_s": 900.0,
}


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        pytest.param({}, [], id="all holds, at the limits"),
        pytest.param({"billed": 22}, ["requests by which"], id="one is lost"),
        pytest.param({"billed": 24}, ["requests by which"], id="one is on the bill twice"),
        pytest.param({"tokens_billed": 183}, ["tokens by which"], id="a token is lost"),
        pytest.param({"answer_s": 900.1}, ["seconds until the ledger"], id="the ledger is late"),
        pytest.param({"ready_s": 1800.1}, ["seconds until the registry"], id="the registry is late"),
        pytest.param({"registry_age_s": 68.1}, ["seconds since"], id="backups are too seldom"),
        pytest.param({"failures": ["the ledger's chain does not hold"]}, ["other differences"], id="something else"),
    ],
)
def test_missed_recovery_objective_fails_its_claim(changed: dict[str, Any], want: list[str]) -> None:
    """Only the changed figure's claim fails, and each claim decides."""
    case = RecoveryCase(**(FINE | changed))
    found = [each for each in judge(DrillFigures(STATED, 8.0, (case,))) if each.passed is False]
    assert len(found) == len(want)
    assert all(each.claim.startswith(start) and each.decides for each, start in zip(found, want, strict=True))


def test_failed_restore_has_no_times() -> None:
    """A failed restore is reported, and its times have no values."""
    case = RecoveryCase("the data directory", 0.1, 3.0, failures=["kelvin restore exited with 1: no backup"])
    verdicts = judge(DrillFigures(STATED, 8.0, (case,)))
    assert [each.claim for each in verdicts if each.passed is False] == ["other differences from before"]
    assert [each.value for each in verdicts if "until" in each.claim] == [None, None]
    assert "restored after -" in table(DrillFigures(STATED, 8.0, (case,)))


def test_a_backup_that_always_has_the_last_requests_is_no_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every backup has the last requests, the journal is not tested, so the drill fails."""
    backups = count()
    monkeypatch.setattr(recovery_drill, "_newest_s", lambda place: float(next(backups)))
    monkeypatch.setattr(recovery_drill, "_backlog", lambda kelvin: 0)
    monkeypatch.setattr(recovery_drill, "_verified", lambda kelvin: {"months": []})
    monkeypatch.setattr(recovery_drill, "_kill", lambda kelvin, place: None)
    kelvin = mock.Mock()
    kelvin.client.complete.return_value = "w1"
    with pytest.raises(InstallationFailed, match="a backup was made while"):
        recovery_drill._run_until_kill(kelvin, tmp_path, recovery_drill.CountingClient("m"), 1)
