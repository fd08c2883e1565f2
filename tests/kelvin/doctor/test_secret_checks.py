"""Secrets, certificates and backups: permissions, randomness, remaining validity and age."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from kelvin.doctor.finding_policy import DAY_S, Finding, FindingLevel
from kelvin.doctor.secret_checks import (
    check_backups,
    judge_age,
    judge_certificate,
    judge_directory,
    judge_file,
    judge_interval,
    judge_key,
    judge_place,
)


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        pytest.param(judge_file("admin.key", 0o644, owned=True), FindingLevel.FAIL, "has mode 0644", id="all may read"),
        pytest.param(
            judge_file("admin.key", 0o660, owned=True), FindingLevel.FAIL, "has mode 0660", id="group may read"
        ),
        pytest.param(
            judge_file("admin.key", 0o600, owned=False), FindingLevel.WARN, "another user", id="another owner"
        ),
        pytest.param(judge_directory(0o755), FindingLevel.WARN, "mode 0755", id="a directory that every user can list"),
        pytest.param(
            judge_key("admin.key", 3), FindingLevel.FAIL, "3 different bytes of 32", id="a secret of three bytes"
        ),
        pytest.param(judge_key("admin.key", None), FindingLevel.FAIL, "holds no key", id="no key"),
        pytest.param(
            judge_place(inside=False, same_disk=True), FindingLevel.WARN, "directory's disk", id="on the same disk"
        ),
        pytest.param(judge_place(inside=True, same_disk=True), FindingLevel.WARN, "inside", id="in the data directory"),
        pytest.param(judge_interval(3600.0), FindingLevel.NOTE, "every 3600 s", id="rare backups"),
        pytest.param(judge_age(2000.0, 240.0, running=True), FindingLevel.FAIL, "2000 s old", id="a late backup"),
        pytest.param(judge_age(None, 240.0, running=True), FindingLevel.FAIL, "none was made", id="no backup yet"),
        pytest.param(
            judge_age(None, 240.0, running=False),
            FindingLevel.NOTE,
            "none was made",
            id="no backup yet, but nothing runs",
        ),
    ],
)
def test_insecure_file_has_cost_and_mend(found: Iterable[Finding], level: FindingLevel, text: str) -> None:
    """Each finding has a cost and a fix."""
    (finding,) = found
    assert (finding.level, text in finding.seen) == (level, True), finding
    assert finding.cost
    assert finding.mend


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(judge_file("admin.key", 0o600, owned=True), id="a file for its owner alone"),
        pytest.param(judge_directory(0o700), id="a directory for its owner alone"),
        pytest.param(judge_key("admin.key", 30), id="a random key"),
        pytest.param(judge_place(inside=False, same_disk=False), id="backups on another disk"),
        pytest.param(judge_interval(240.0), id="a backup as often as stated"),
        pytest.param(judge_age(100.0, 240.0, running=True), id="a new backup"),
        pytest.param(judge_age(2000.0, 240.0, running=False), id="an old backup, but nothing runs"),
    ],
)
def test_secure_files_have_no_finding(found: Iterable[Finding]) -> None:
    """Negative control: good values give no finding."""
    assert list(found) == []


@pytest.mark.parametrize(
    ("left_s", "level"),
    [
        pytest.param(300 * DAY_S, FindingLevel.OK, id="most of a year"),
        pytest.param(29 * DAY_S, FindingLevel.WARN, id="less than a month"),
        pytest.param(-1.0, FindingLevel.FAIL, id="expired"),
        pytest.param(None, FindingLevel.FAIL, id="unreadable"),
    ],
)
def test_certificate_is_judged_by_remaining_time(left_s: float | None, level: FindingLevel) -> None:
    assert judge_certificate("of the CA", left_s, "make another").level is level


def test_certificate_of_the_future_fails() -> None:
    """A certificate made with a fast clock is refused by callers until it becomes valid, whatever its end."""
    found = judge_certificate("of the CA", 3000 * DAY_S, "make another", begins_in_s=3600.0)
    assert (found.level, "not valid before 1.0 hours" in found.seen) == (FindingLevel.FAIL, True)
    assert judge_certificate("of the CA", 3000 * DAY_S, "make another", begins_in_s=-1.0).level is FindingLevel.OK


def test_newest_backup_decides_the_finding(tmp_path: Path) -> None:
    """The newest backup that isn't from the future is judged. Without the setting, the finding says so."""
    data, place = tmp_path / "data", tmp_path / "data" / "backups"
    place.mkdir(parents=True)
    (found,) = check_backups(data, None, 240.0, running=True)
    assert (found.level, found.seen) == (FindingLevel.WARN, "KELVIN_BACKUP is not set")
    assert [each.seen for each in check_backups(data, str(place), 240.0, running=True)] == [
        "they are inside the data directory", "none was made yet",
    ]  # fmt: skip
    for name, at_s in (("kelvin-1.backup", 2**32), ("kelvin-2.backup", 1.0)):
        (place / name).touch()
        os.utime(place / name, (at_s, at_s))
    late = check_backups(data, str(place), 240.0, running=True)[-1]
    assert (late.level, "s old, with one every 240 s" in late.seen) == (FindingLevel.FAIL, True)
