"""Look at the certificates that settings name as files: when they end. No key is read.

Of a chain the leaf counts. Of a file of authorities the one that signed our chain does, of several of that name the
last to end, as one takes the other's place; where nobody knows who signed, the last to end of all.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cryptography import x509

from contracts.roles import Role
from kelvin.policy.certificates import CertificateFile, Use
from service.certificate import read_chain
from service.identity import AUTHORITIES, CERTIFICATE

FRONT: Final = ("tls.crt", "fullchain.pem")  # as `activator/certificate_files.py` takes pairs
# Parameters of a setting's URL; whether it is a chain of ours, or authorities.
_OF_URLS: Final = (
    ("KELVIN_DATABASE", "sslrootcert", Use.DATABASE, False),
    ("KELVIN_DATABASE", "sslcert", Use.DATABASE, True),
    ("KELVIN_REDIS", "ssl_ca_certs", Use.REDIS, False),
    ("KELVIN_REDIS", "ssl_certfile", Use.REDIS, True),
)
_SYSTEM: Final = "system"  # libpq's name of no file


def look_at_certificates(env: Mapping[str, str]) -> list[CertificateFile]:
    """Each file once, with what is worst of it. What of a setting can't be understood is its service's to say."""
    worst: dict[tuple[str, str], CertificateFile] = {}
    for file in (*_front(env), *_inner(env), *_of_urls(env), *_of_issuers(env)):
        known = worst.setdefault((file.setting, file.path), file)
        if _left(file) < _left(known):
            worst[file.setting, file.path] = file
    return list(worst.values())


def _left(file: CertificateFile) -> float:
    return float("-inf") if file.left_s is None or file.begins_in_s > 0 else file.left_s


def _front(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    if not (place := env.get("KELVIN_CERTIFICATES")):
        return
    for path in _pairs(Path(place)) or [Path(place)]:
        yield CertificateFile("KELVIN_CERTIFICATES", str(path), Use.FRONT, *_of_leaf(_read(path)))


def _pairs(directory: Path) -> list[Path]:
    try:
        below = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
        return [path for place in (directory, *below) for name in FRONT if os.path.exists(path := place / name)]
    except OSError:
        return []


def _inner(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    """Of each role that has files of its own here, and of what lies there for all of them."""
    if not (directory := env.get("KELVIN_INNER_TLS")):
        return
    bundle, home = env.get("KELVIN_INNER_CA"), Path(directory)
    places = [place for place in (home, *(home / role for role in Role)) if os.path.exists(place / CERTIFICATE)]
    for place in places or [home]:
        chain = _read(place / CERTIFICATE)
        yield CertificateFile("KELVIN_INNER_TLS", str(place / CERTIFICATE), Use.INNER, *_of_leaf(chain))
        setting, path = ("KELVIN_INNER_CA", Path(bundle)) if bundle else ("KELVIN_INNER_TLS", place / AUTHORITIES)
        yield CertificateFile(setting, str(path), Use.INNER_AUTHORITY, *_of_authority(_read(path), chain))


def _of_urls(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    for setting, name, use, is_ours in _OF_URLS:
        try:
            paths = parse_qs(urlsplit(env.get(setting, "")).query).get(name, ())
        except ValueError:
            continue
        for path in paths:
            if path != _SYSTEM:
                found = _read(Path(path))
                yield CertificateFile(setting, path, use, *(_of_leaf if is_ours else _of_authority)(found))


def _of_issuers(env: Mapping[str, str]) -> Iterator[CertificateFile]:
    if not (place := env.get("KELVIN_OIDC")):
        return
    try:
        entries = tomllib.loads(Path(place).read_text(encoding="utf-8")).get("issuer")
    except (OSError, ValueError, RecursionError):
        return
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(ca := entry.get("ca"), str):
            path = Path(place).parent / ca
            yield CertificateFile("KELVIN_OIDC", str(path), Use.ISSUER, *_of_authority(_read(path)))


def _read(path: Path) -> list[x509.Certificate]:
    """Empty where there is none that can be read."""
    try:
        return read_chain(path.read_bytes())
    except (OSError, ValueError):
        return []


class _Times(NamedTuple):
    """Seconds from now, as in `CertificateFile`."""

    left_s: float | None
    begins_in_s: float = 0.0


def _of_leaf(chain: Sequence[x509.Certificate]) -> _Times:
    return _times(chain[0]) if chain else _Times(None)


def _of_authority(authorities: Sequence[x509.Certificate], chain: Sequence[x509.Certificate] = ()) -> _Times:
    issuers = {each.issuer for each in chain}
    counting = [each for each in authorities if each.subject in issuers] or authorities
    return max(
        map(_times, counting), key=lambda each: (each.begins_in_s <= 0, each.left_s or 0.0), default=_Times(None)
    )


def _times(certificate: x509.Certificate) -> _Times:
    now = datetime.now(UTC)
    left, begins_in = certificate.not_valid_after_utc - now, certificate.not_valid_before_utc - now
    return _Times(left.total_seconds(), begins_in.total_seconds())
