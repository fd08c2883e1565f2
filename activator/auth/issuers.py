"""Read the TOML file of trusted token issuers at the start, and check every field."""

import re
import ssl
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from yarl import URL

from activator.auth.claims_policy import Issuer
from activator.auth.key_set_policy import KINDS
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.wire import convert

SETTING: Final = "KELVIN_OIDC"
_Name = Annotated[str, Meta(min_length=1, max_length=255)]
_URL: Final = re.compile(r"https://[!-~]{1,2000}")


@dataclass(frozen=True, slots=True)
class KeySetSource:
    """Where to fetch a key set, and how long it is valid."""

    url: str
    tls: ssl.SSLContext
    refresh_s: float
    max_age_s: float


@dataclass(frozen=True, slots=True)
class TrustedIssuer:
    """An issuer, and the source of its keys."""

    issuer: Issuer
    source: KeySetSource


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[issuer]]` table of the file."""

    issuer: _Name
    audience: _Name
    jwks: str
    algorithms: Annotated[list[str], Meta(min_length=1)]
    tenant_claim: _Name
    tenants: Annotated[list[str], Meta(min_length=1)]
    scopes: Annotated[list[Scope], Meta(min_length=1)]
    scope_claim: _Name | None = None
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 30.0
    refresh_s: Annotated[float, Meta(ge=10, le=86_400)] = 300.0
    max_age_s: Annotated[float, Meta(ge=1, le=604_800)] = 86_400.0
    ca: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    issuer: Annotated[list[_Entry], Meta(min_length=1, max_length=64)]


def read_issuers(path: Path) -> tuple[TrustedIssuer, ...]:
    """Read the file. Raises BadSetting, naming the file, the field and its rule."""
    try:
        content = convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        trusted = tuple(_convert_entry(entry, path.parent) for entry in content.issuer)
    except OSError as error:
        raise BadSetting(SETTING, str(path), error.strerror or "can't be read") from error
    except RecursionError:
        raise BadSetting(SETTING, str(path), "is nested too deeply") from None
    except ValueError as error:  # invalid TOML, invalid UTF-8, or msgspec's error for a field
        raise BadSetting(SETTING, str(path), str(error)[:400]) from error
    names = [each.issuer.name for each in trusted]
    if len(names) != len(set(names)):
        raise BadSetting(SETTING, str(path), "names an issuer twice")
    return trusted


def _convert_entry(entry: _Entry, directory: Path) -> TrustedIssuer:
    """Check an entry and convert it. Raises ValueError, also as BadSetting."""
    if unknown := set(entry.algorithms) - set(KINDS):
        raise ValueError(f"algorithms: {', '.join(sorted(unknown))[:80]}: must be some of {', '.join(KINDS)}")
    if Scope.OPERATOR in entry.scopes:
        raise ValueError("scopes: operator: no token is an operator's; keys are")
    if _URL.fullmatch(entry.jwks) is None or not URL(entry.jwks).host:
        raise ValueError(f"jwks: {entry.jwks[:80]!r}: must be an https:// URL")
    for tenant in entry.tenants:
        if not _is_label(tenant):
            raise ValueError(f"tenants: {tenant[:80]!r}: must be DNS labels")
    issuer = Issuer(
        name=entry.issuer,
        audience=entry.audience,
        algorithms=frozenset(entry.algorithms),
        tenant_claim=entry.tenant_claim,
        tenants=frozenset(entry.tenants),
        scopes=tuple(scope for scope in Scope if scope in entry.scopes),
        scope_claim=entry.scope_claim,
        leeway_s=entry.leeway_s,
    )
    return TrustedIssuer(
        issuer, KeySetSource(entry.jwks, _tls_context(entry.ca, directory), entry.refresh_s, entry.max_age_s)
    )


def _is_label(name: str) -> bool:
    try:
        require_dns_label(name, "tenants")
    except Exception:
        return False
    return True


def _tls_context(ca: str | None, directory: Path) -> ssl.SSLContext:
    """Return a context with the system's roots, or a PEM file's. Relative paths start at the issuers' file."""
    if ca is None:
        return ssl.create_default_context()
    ca_path = directory / ca
    try:
        return ssl.create_default_context(cafile=str(ca_path))
    except ssl.SSLError as error:
        raise ValueError(f"ca: {str(ca_path)[:200]!r}: holds no certificate") from error
    except OSError as error:
        raise ValueError(f"ca: {str(ca_path)[:200]!r}: {error.strerror or 'can not be read'}") from error
