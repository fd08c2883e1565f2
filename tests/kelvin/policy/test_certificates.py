"""Certificates that settings name: one that has ended fails, one that ends soon is told, each with cost and mend."""

import pytest

from kelvin.policy.certificates import CertificateFile, Use, judge_certificate_files
from kelvin.policy.findings import Level
from kelvin.policy.guarding import DAY_S


def file(left_s: float | None, use: Use = Use.FRONT) -> CertificateFile:
    return CertificateFile("KELVIN_CERTIFICATES", "/c/tls.crt", use, left_s)


@pytest.mark.parametrize(
    ("left_s", "level", "says"),
    [
        pytest.param(None, Level.FAIL, "/c/tls.crt (KELVIN_CERTIFICATES) holds none that can be read", id="unreadable"),
        pytest.param(-2.0 * DAY_S, Level.FAIL, "expired 2 days ago", id="ended"),
        pytest.param(0.0, Level.FAIL, "expired 0 days ago", id="ends now"),
        pytest.param(13.0 * DAY_S, Level.WARN, "is good for 13 days", id="less than two weeks"),
        pytest.param(14.0 * DAY_S, Level.OK, "2 that settings name, good for 14 days", id="two weeks"),
    ],
)
@pytest.mark.parametrize("use", list(Use))
def test_what_is_left(left_s: float | None, level: Level, says: str, use: Use) -> None:
    """The good one beside it is not spoken of where there is a bad one."""
    (found,) = judge_certificate_files([file(left_s, use), file(99.0 * DAY_S)])
    assert (found.level, says in found.seen) == (level, True), found
    assert bool(found.cost and found.mend) is (level is not Level.OK)


def test_certificate_of_the_future_fails() -> None:
    """It is refused until then, however long it lasts."""
    (found,) = judge_certificate_files([CertificateFile("KELVIN_REDIS", "/c/ca", Use.REDIS, 99.0 * DAY_S, 7200.0)])
    assert (found.level, "not valid before 2.0 hours" in found.seen) == (Level.FAIL, True)


def test_none() -> None:
    """Where no setting names any, nothing is said; of several bad ones each is."""
    assert judge_certificate_files([]) == []
    assert len(judge_certificate_files([file(None), file(-1.0)])) == 2
