"""What guards an installation: who reads its secrets, how random they are, how long certificates and backups hold."""

from dataclasses import replace

import pytest

from kelvin.policy.findings import Level
from kelvin.policy.guarding import (
    DAY_S,
    BackupFacts,
    SecretFile,
    judge_backups,
    judge_certificate,
    judge_files,
)

KEY = SecretFile("admin.key", 0o600, owned=True, different=30)
BACKUPS = BackupFacts("/mnt/b", 100.0, 240.0, same_disk=False, inside=False, running=True)


@pytest.mark.parametrize(
    ("changed", "level", "says"),
    [
        pytest.param({}, Level.OK, "1 files", id="a good key"),
        pytest.param({"mode": 0o644}, Level.FAIL, "admin.key has mode 0644", id="everybody reads it"),
        pytest.param({"mode": 0o660}, Level.FAIL, "admin.key has mode 0660", id="the group reads it"),
        pytest.param({"owned": False}, Level.WARN, "another user's", id="somebody else's"),
        pytest.param({"different": 3}, Level.FAIL, "3 different bytes of 32", id="a secret of three bytes"),
        pytest.param({"is_key_text": False, "different": None}, Level.FAIL, "holds no key", id="something else"),
    ],
)
def test_files(changed: dict[str, object], level: Level, says: str) -> None:
    """The worst is named, with its mend."""
    (found,) = judge_files([replace(KEY, **changed)], 0o700)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found
    assert level is Level.OK or (found.cost and found.mend)


def test_directory() -> None:
    """Of others' reading the directory itself; none is no fault."""
    assert judge_files([KEY], 0o755)[0].level is Level.WARN
    assert judge_files([], None)[0].level is Level.OK


@pytest.mark.parametrize(
    ("left_s", "level"),
    [
        pytest.param(300 * DAY_S, Level.OK, id="most of a year"),
        pytest.param(29 * DAY_S, Level.WARN, id="less than a month"),
        pytest.param(-1.0, Level.FAIL, id="expired"),
        pytest.param(None, Level.FAIL, id="unreadable"),
    ],
)
def test_certificate(left_s: float | None, level: Level) -> None:
    """By what is left of it."""
    assert judge_certificate("of the CA", left_s, "make another").level is level


def test_certificate_of_the_future_fails() -> None:
    """A clock that was ahead made it: every caller refuses it until then, however long it lasts."""
    found = judge_certificate("of the CA", 3000 * DAY_S, "make another", begins_in_s=3600.0)
    assert (found.level, "not valid before 1.0 hours" in found.seen) == (Level.FAIL, True)
    assert judge_certificate("of the CA", 3000 * DAY_S, "make another", begins_in_s=-1.0).level is Level.OK


@pytest.mark.parametrize(
    ("changed", "level", "says"),
    [
        pytest.param({}, Level.OK, "100 s old", id="as stated"),
        pytest.param({"place": None}, Level.WARN, "not set", id="none"),
        pytest.param({"same_disk": True}, Level.WARN, "data directory's disk", id="on the same disk"),
        pytest.param({"inside": True}, Level.WARN, "inside", id="in the data directory"),
        pytest.param({"every_s": 3600.0}, Level.NOTE, "each 3600 s", id="seldom"),
        pytest.param({"age_s": 2000.0}, Level.FAIL, "2000 s old", id="late"),
        pytest.param({"age_s": 2000.0, "running": False}, Level.OK, "2000 s old", id="late, but nothing runs"),
        pytest.param({"age_s": None}, Level.FAIL, "none was made", id="none yet"),
        pytest.param({"age_s": None, "running": False}, Level.NOTE, "none was made", id="none yet, but nothing runs"),
    ],
)
def test_backups(changed: dict[str, object], level: Level, says: str) -> None:
    """Level and words."""
    (found,) = judge_backups(replace(BACKUPS, **changed))  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found
