"""Check the validity times of certificates in files that settings name. No private key is read.

Both our own certificates and the CA certificates that we trust are checked:

- Of a certificate chain, the leaf counts.
- Of a CA file, the CA that signed our chain counts. If several CAs have that name (one replaces another), the one that
  ends last counts. If our chain is unknown, the one that ends last of all counts.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cryptography import x509

from kelvin.contracts.roles import Role
from kelvin.crypto.pem_certificates import read_chain
from kelvin.crypto.tls_identity import AUTHORITIES, CERTIFICATE
from kelvin.doctor.finding_policy import DAY_S, Finding, FindingLevel

# Renewal usually happens when a third of the lifetime is left: 30 days before a 90-day certificate ends.
EXPIRY_WARNING_S: Final = 14 * DAY_S
# The same names in the same order as in `activator/tls/certificate_files.py`.
FRONT: Final = ("tls.crt", "fullchain.pem")


class CertificateUse(Enum):
    """Purpose of a certificate file. The value is `(cost, mend)`: what stops working without it, and what to do."""

    FRONT = (
        "callers who ask for its names refuse it",
        "renew it there: the activator reads a pair again when it changes",
    )
    INNER = (
        "processes on other hosts refuse this one, and it does not start",
        "renew it there: processes read it again when it changes",
    )
    INNER_AUTHORITY = (
        "certificates that it signed are refused: processes on different hosts can't connect",
        "add the new CA to that file on every host, then renew the certificates that the old CA signed",
    )
    DATABASE = ("the control plane loses its database: changes are refused, records wait", "renew it there")
    REDIS = ("activators lose their shared counts: each one limits by its own", "renew it there")
    ISSUER = (
        "the token issuer's keys can't be fetched any more: its tokens are refused",
        "put the new certificate of its CA there, and restart the activator",
    )


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """Validity of a certificate file. `left_s` None: no readable certificate. `begins_in_s` above 0: not yet valid."""

    setting: str
    path: str
    use: CertificateUse
    left_s: float | None
    begins_in_s: float = 0.0


# Setting, query parameter of its URL that names the file, use, and whether the file is our own chain (else a CA file).
_OF_URLS: Final = (
    ("KELVIN_DATABASE", "sslrootcert", CertificateUse.DATABASE, False),
    ("KELVIN_DATABASE", "sslcert", CertificateUse.DATABASE, True),
    ("KELVIN_REDIS", "ssl_ca_certs", CertificateUse.REDIS, False),
    ("KELVIN_REDIS", "ssl_certfile", CertificateUse.REDIS, True),
)
_SYSTEM: Final = "system"  # libpq: trust the system's CAs, no file


def check_certificate_files(env: Mapping[str, str]) -> list[Finding]:
    """Return a finding per file that expired or expires soon; else one that all are good; nothing without files."""
    files = read_certificate_files(env)
    findings = [found for file in files if (found := judge_certificate_file(file)) is not None]
    if findings or not files:
        return findings
    days = min(file.left_s or 0.0 for file in files) / DAY_S
    return [Finding("certificate files", FindingLevel.OK, f"{len(files)} valid for {days:.0f} days or more")]


def read_certificate_files(env: Mapping[str, str]) -> list[CertificateFile]:
    """Return each file once, with its worst validity. A setting that can't be parsed is left to its service."""
    worst: dict[tuple[str, str], CertificateFile] = {}
    for file in (*_front_door_files(env), *_role_files(env), *_database_files(env), *_issuer_files(env)):
        known = worst.setdefault((file.setting, file.path), file)
        if _effective_left_s(file) < _effective_left_s(known):
            worst[file.setting, file.path] = file
    return list(worst.values())


def judge_certificate_file(file: CertificateFile) -> Finding | None:
    """Return the finding of one file, or None if it is good."""
    cost, mend = file.use.value
    where = f"{file.path} ({file.setting})"
    if file.left_s is None:
        return Finding("certificate file", FindingLevel.FAIL, f"{where} holds no readable certificate", cost, mend)
    if file.begins_in_s > 0:
        seen = f"{where} is not valid before {file.begins_in_s / 3600:.1f} hours from now"
        return Finding("certificate file", FindingLevel.FAIL, seen, cost, f"set this machine's clock right, or {mend}")
    if file.left_s <= 0:
        seen = f"{where} expired {abs(file.left_s) / DAY_S:.0f} days ago"
        return Finding("certificate file", FindingLevel.FAIL, seen, cost, mend)
    if file.left_s < EXPIRY_WARNING_S:
        seen = f"{where} is good for {file.left_s / DAY_S:.0f} days"
        return Finding("certificate file", FindingLevel.WARN, seen, f"then {cost}", mend)
    return None


def times_of_leaf(path: Path) -> "ValidityTimes":
    """Return the validity times of the first certificate in the file."""
    return _leaf_times(_read(path))


def _effective_left_s(file: CertificateFile) -> float:
    return float("-inf") if file.left_s is None or file.begins_in_s > 0 else file.left_s


def _front_door_files(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    if not (place := env.get("KELVIN_CERTIFICATES")):
        return
    for path in _certificate_pairs(Path(place)) or [Path(place)]:
        yield CertificateFile("KELVIN_CERTIFICATES", str(path), CertificateUse.FRONT, *_leaf_times(_read(path)))


def _certificate_pairs(directory: Path) -> list[Path]:
    try:
        below = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
        return [path for place in (directory, *below) for name in FRONT if os.path.exists(path := place / name)]
    except OSError:
        return []


def _role_files(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    """Yield the files of each role with a folder of its own, and the files that all roles share."""
    if not (directory := env.get("KELVIN_INNER_TLS")):
        return
    bundle, home = env.get("KELVIN_INNER_CA"), Path(directory)
    places = [place for place in (home, *(home / role for role in Role)) if os.path.exists(place / CERTIFICATE)]
    for place in places or [home]:
        chain = _read(place / CERTIFICATE)
        yield CertificateFile("KELVIN_INNER_TLS", str(place / CERTIFICATE), CertificateUse.INNER, *_leaf_times(chain))
        setting, path = ("KELVIN_INNER_CA", Path(bundle)) if bundle else ("KELVIN_INNER_TLS", place / AUTHORITIES)
        yield CertificateFile(setting, str(path), CertificateUse.INNER_AUTHORITY, *_authority_times(_read(path), chain))


def _database_files(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    for setting, name, use, is_ours in _OF_URLS:
        try:
            paths = parse_qs(urlsplit(env.get(setting, "")).query).get(name, ())
        except ValueError:
            continue
        for path in paths:
            if path != _SYSTEM:
                found = _read(Path(path))
                yield CertificateFile(setting, path, use, *(_leaf_times if is_ours else _authority_times)(found))


def _issuer_files(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    if not (place := env.get("KELVIN_OIDC")):
        return
    try:
        entries = tomllib.loads(Path(place).read_text(encoding="utf-8")).get("issuer")
    except (OSError, ValueError, RecursionError):
        return
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(ca := entry.get("ca"), str):
            path = Path(place).parent / ca
            yield CertificateFile("KELVIN_OIDC", str(path), CertificateUse.ISSUER, *_authority_times(_read(path)))


def _read(path: Path) -> list[x509.Certificate]:
    """Return the certificates of a file. Empty if the file can't be read or holds none."""
    try:
        return read_chain(path.read_bytes())
    except (OSError, ValueError):
        return []


class ValidityTimes(NamedTuple):
    """Seconds from now until a certificate ends and begins, as in `CertificateFile`."""

    left_s: float | None
    begins_in_s: float = 0.0


def _leaf_times(chain: Sequence[x509.Certificate]) -> ValidityTimes:
    return _times(chain[0]) if chain else ValidityTimes(None)


def _authority_times(authorities: Sequence[x509.Certificate], chain: Sequence[x509.Certificate] = ()) -> ValidityTimes:
    issuers = {each.issuer for each in chain}
    counting = [each for each in authorities if each.subject in issuers] or authorities
    return max(
        map(_times, counting), key=lambda each: (each.begins_in_s <= 0, each.left_s or 0.0), default=ValidityTimes(None)
    )


def _times(certificate: x509.Certificate) -> ValidityTimes:
    now = datetime.now(UTC)
    left, begins_in = certificate.not_valid_after_utc - now, certificate.not_valid_before_utc - now
    return ValidityTimes(left.total_seconds(), begins_in.total_seconds())
