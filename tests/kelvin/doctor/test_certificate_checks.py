"""`kelvin doctor` checks every certificate file that a setting names.

Expired certificates fail and soon expiring ones warn, with cost and fix. In a file of several, the relevant one is
judged.
"""

from datetime import timedelta
from pathlib import Path

import pytest

from kelvin.contracts.roles import Role
from kelvin.doctor.certificate_checks import (
    CertificateFile,
    CertificateUse,
    check_certificate_files,
    judge_certificate_file,
    read_certificate_files,
)
from kelvin.doctor.finding_policy import DAY_S, FindingLevel
from tests.kelvin.crypto.pki import Authority, write
from tests.kelvin.doctor.test_doctor import doctor

YEAR, WEEK, AGO = timedelta(days=365), timedelta(days=7), timedelta(hours=-1)
OLD, NEW, NEXT = Authority("old", AGO), Authority("new", WEEK), Authority("next", YEAR)


def days_left(env: dict[str, str]) -> dict[str, int | None]:
    """Return the rounded days left, by the last two parts of each file's path."""
    found = read_certificate_files(env)
    assert len({file.path for file in found}) == len(found)
    days = {"/".join(Path(file.path).parts[-2:]): file.left_s for file in found}
    return {name: None if left_s is None else round(left_s / DAY_S) for name, left_s in days.items()}


def test_front_door_certificates_are_found(tmp_path: Path) -> None:
    """Leaf certificates are found by either name, also in subdirectories. A directory without any is reported."""
    for name, place, ends_in in (
        ("tls.crt", "a", YEAR),
        ("fullchain.pem", "b", AGO),
        ("fullchain.pem", ".hidden", AGO),
    ):
        (tmp_path / place).mkdir()
        (tmp_path / place / name).write_bytes(NEXT.sign(ends_in=ends_in).certificate + OLD.pem)
    (tmp_path / "c").mkdir()
    env = {"KELVIN_CERTIFICATES": str(tmp_path)}
    assert days_left(env) == {"a/tls.crt": 365, "b/fullchain.pem": 0}
    assert [file.use for file in read_certificate_files(env)] == [CertificateUse.FRONT] * 2
    for empty in (tmp_path / "c", tmp_path / "none"):
        (file,) = read_certificate_files({"KELVIN_CERTIFICATES": str(empty)})
        assert (file.path, file.left_s) == (str(empty), None)


def test_role_certificates_and_their_issuer_are_found(tmp_path: Path) -> None:
    """Each role's leaf is found, and the authority that signed it. Other authorities may be expired or new."""
    write(tmp_path / Role.ACTIVATOR, NEW.sign("x://activator", ends_in=YEAR), OLD, NEW, NEXT)
    write(tmp_path / Role.CONTROLPLANE, NEXT.sign("x://controlplane", ends_in=WEEK), OLD, NEXT)
    env = {"KELVIN_INNER_TLS": str(tmp_path)}
    assert days_left(env) == {
        "activator/tls.crt": 365, "activator/ca.crt": 7, "controlplane/tls.crt": 7, "controlplane/ca.crt": 365,
    }  # fmt: skip
    (tmp_path / "bundle").write_bytes(NEW.pem + NEXT.pem)
    shared = days_left({**env, "KELVIN_INNER_CA": str(tmp_path / "bundle")})
    assert shared.pop(f"{tmp_path.name}/bundle") == 7, "the worst of what is signed by it"
    assert set(shared) == {"activator/tls.crt", "controlplane/tls.crt"}
    write(tmp_path / "all", OLD.sign("x://activator"), OLD)
    assert days_left({"KELVIN_INNER_TLS": str(tmp_path / "all")}) == {"all/tls.crt": 0, "all/ca.crt": 0}
    assert days_left({"KELVIN_INNER_TLS": str(tmp_path / "none")}) == {"none/tls.crt": None, "none/ca.crt": None}


def test_trusted_authorities_are_judged_by_the_last_expiry(tmp_path: Path) -> None:
    """A bundle for databases or issuers is judged by its longest valid certificate. Other settings are ignored."""
    roots, gone = tmp_path / "roots.pem", tmp_path / "gone.pem"
    roots.write_bytes(OLD.pem + NEW.pem)
    (tmp_path / "own.pem").write_bytes(NEXT.sign(ends_in=AGO).certificate + NEXT.pem)
    (tmp_path / "issuers").write_text('[[issuer]]\nca = "roots.pem"\n[[issuer]]\nissuer = "x"\n')
    env = {
        "KELVIN_DATABASE": f"postgresql://kelvin@db/kelvin?sslrootcert={roots}&sslcert={tmp_path}/own.pem",
        "KELVIN_REDIS": f"rediss://:secret@redis/0?ssl_ca_certs={gone}",
        "KELVIN_OIDC": str(tmp_path / "issuers"),
    }
    found = [(file.setting, Path(file.path).name, file.left_s) for file in read_certificate_files(env)]
    assert [(setting, name, left_s and round(left_s / DAY_S)) for setting, name, left_s in found] == [
        ("KELVIN_DATABASE", "roots.pem", 7), ("KELVIN_DATABASE", "own.pem", 0), ("KELVIN_REDIS", "gone.pem", None),
        ("KELVIN_OIDC", "roots.pem", 7),
    ]  # fmt: skip
    (tmp_path / "issuers").write_text("issuer = 3")
    for strange in (
        {"KELVIN_DATABASE": "postgresql://kelvin@db/kelvin?sslrootcert=system"},
        {"KELVIN_DATABASE": "postgresql://kelvin@[db/kelvin?sslrootcert=/x"},
        {"KELVIN_OIDC": str(tmp_path / "issuers")},
        {"KELVIN_OIDC": str(tmp_path / "none")},
        {"KELVIN_TRUST_ROOTS": str(tmp_path)},
        {},
    ):
        assert read_certificate_files(strange) == []


def file(left_s: float | None, use: CertificateUse = CertificateUse.FRONT, begins_in_s: float = 0.0) -> CertificateFile:
    return CertificateFile("KELVIN_CERTIFICATES", "/c/tls.crt", use, left_s, begins_in_s)


@pytest.mark.parametrize(
    ("left_s", "level", "text"),
    [
        pytest.param(
            None, FindingLevel.FAIL, "/c/tls.crt (KELVIN_CERTIFICATES) holds no readable certificate", id="unreadable"
        ),
        pytest.param(-2.0 * DAY_S, FindingLevel.FAIL, "expired 2 days ago", id="ended"),
        pytest.param(0.0, FindingLevel.FAIL, "expired 0 days ago", id="ends now"),
        pytest.param(13.0 * DAY_S, FindingLevel.WARN, "is good for 13 days", id="less than two weeks"),
    ],
)
@pytest.mark.parametrize("use", list(CertificateUse))
def test_expiring_certificate_has_cost_and_mend(
    left_s: float | None, level: FindingLevel, text: str, use: CertificateUse
) -> None:
    """Every finding has a cost and a fix. From two weeks on there is no finding."""
    found = judge_certificate_file(file(left_s, use))
    assert found is not None
    assert (found.level, text in found.seen) == (level, True), found
    assert found.cost
    assert found.mend
    assert judge_certificate_file(file(14.0 * DAY_S, use)) is None


def test_certificate_of_the_future_fails() -> None:
    """A certificate is refused until it becomes valid, whatever its end."""
    found = judge_certificate_file(file(99.0 * DAY_S, begins_in_s=7200.0))
    assert found is not None
    assert (found.level, "not valid before 2.0 hours" in found.seen) == (FindingLevel.FAIL, True)


def test_good_certificates_are_one_line(tmp_path: Path) -> None:
    """Good certificates are one finding. If one is bad, only that one is reported. Without settings there is none."""
    for name, ends_in in (("good", YEAR), ("ended", AGO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_bytes(NEXT.sign(ends_in=ends_in).certificate)
    (bad,) = check_certificate_files({"KELVIN_CERTIFICATES": str(tmp_path)})
    assert "ended/tls.crt" in bad.seen
    (good,) = check_certificate_files({"KELVIN_CERTIFICATES": str(tmp_path / "good")})
    assert (good.level, good.seen) == (FindingLevel.OK, "1 valid for 365 days or more")
    assert check_certificate_files({}) == []


@pytest.mark.deep
def test_doctor_reports_expired_certificates(tmp_path: Path) -> None:
    """The command fails on an expired certificate and reports a valid one as a single line."""
    front = tmp_path / "front"
    write(front, NEXT.sign(ends_in=AGO))
    found = doctor(tmp_path, 1, env={"KELVIN_CERTIFICATES": str(front)})["certificate file"]
    assert (found["level"], "expired 0 days ago" in found["seen"]) == ("fail", True)
    assert "KELVIN_CERTIFICATES" in found["seen"]
    assert found["cost"]
    assert found["mend"]
    write(front, NEXT.sign(ends_in=YEAR))
    found = doctor(tmp_path, 0, env={"KELVIN_CERTIFICATES": str(front)})
    assert found["certificate files"]["level"] == "ok"
    assert "certificate file" not in found
