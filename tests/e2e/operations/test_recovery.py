"""Backup and restore as an operator runs them, and the recovery drill."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from coldstart_bench.suites import recovery_drill
from coldstart_bench.suites.recovery_drill import DrillPlan, drill, judge
from tests.e2e.commands import run_to_end
from tests.e2e.https_client import complete
from tests.e2e.installation_processes import refused_start
from tests.e2e.installation_state import bill, is_recorded


def run(*words: str, code: int = 0) -> str:
    """Return the command's output and errors. Its exit code must be `code`."""
    status, out, err = run_to_end(*words)
    assert status == code, out + err
    return out + err


@pytest.mark.deep
def test_a_running_installation_is_backed_up_and_restored(kelvin: Installation, tmp_path: Path) -> None:
    """A backup is one private file. Its restore has keys and ledger, and a tampered one restores nothing."""
    answer = complete(kelvin, "llama", "w1", max_tokens=1)
    kelvin.wait(lambda: is_recorded(kelvin, answer.headers["x-request-id"]), "it is in the ledger")
    file, new, before = tmp_path / "one.backup", tmp_path / "new", bill(kelvin)
    said = json.loads(run("backup", str(file), "--data", str(kelvin.data), "--json"))
    assert said["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    report = json.loads(run("restore", str(file), "--data", str(new), "--json"))
    assert {"llama", "qwen2"} <= {version["model"] for version in report["versions"]}
    assert (report["missing"], report["aside"]) == (0, None)
    wanted = ("default", before["month"])
    (links,) = (each["links"] for each in report["chains"] if (each["tenant"], each["month"]) == wanted)
    assert links >= sum(before["requests"].values())
    for name in ("admin.key", "default.key", "ca.pem", "tls/ca.key", "attest.key"):
        assert (new / name).read_bytes() == (kelvin.data / name).read_bytes()
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert "nothing was restored" in run("restore", str(file), "--data", str(tmp_path / "no"), code=1)
    assert not (tmp_path / "no" / "kelvin.db").exists()


def test_nothing_is_restored_over_a_running_installation(kelvin: Installation, tmp_path: Path) -> None:
    """A restore over a running installation, and a start after an unfinished restore, are refused with the remedy."""
    (tmp_path / "x.backup").touch()
    assert "is in use by process" in run("restore", str(tmp_path / "x.backup"), "--data", str(kelvin.data), code=1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "restoring").touch()
    assert "run `kelvin restore` again" in refused_start(tmp_path / "data")
    assert "nothing runs in" in run("backup", str(tmp_path / "y.backup"), "--data", str(tmp_path), code=1)


@pytest.mark.long
@pytest.mark.deep
@pytest.mark.timeout(600)
def test_recovery_drill_meets_its_objectives(tmp_path: Path) -> None:
    """Both losses are recovered in time, and nothing is missing."""
    command = [sys.executable, "-m", "kelvin.cli.main", "drill", "recovery", "--requests", "5"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "report.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"], done.stdout
    assert [case["lost"] for case in report["cases"]] == ["the database", "the data directory"]
    for case in report["cases"]:
        assert case["answered"] == case["billed"] > 0
        assert case["tokens_answered"] == case["tokens_billed"] > 0


def _last_records(place: Path) -> None:
    """Empty the journal's newest segment, without a trace that it had records."""
    newest = max((place / "journal").glob("*.seg"))
    newest.write_bytes(b"")


@pytest.mark.long
@pytest.mark.deep
@pytest.mark.timeout(600)
def test_recovery_drill_fails_if_records_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the journal's last segment the restore succeeds, and the drill fails."""
    monkeypatch.setattr(recovery_drill, "SETTLE_S", 3.0)  # the missing records will not come
    found = drill(DrillPlan(3, tell=lambda _: None), tmp_path, losses=("the database",), damage_backups=_last_records)
    (case,) = found.cases
    assert case.billed < case.answered
    assert "requests by which" in " ".join(each.claim for each in judge(found) if each.passed is False), found
