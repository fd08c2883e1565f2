"""Mutual TLS between Kelvin processes on different hosts, with roles in the certificates.

Any PKI can write the files: `tls.crt` (leaf and chain, for both ends of a connection), `tls.key`, and `ca.crt` with the
authorities (two of them during a rotation). Changed files are read again: new connections use them, open connections
are not closed. Host names are not checked. Pods come and go, so a process is identified by its role.
"""

import asyncio
import datetime
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from cryptography import x509

from kelvin.contracts.roles import Role, role_of
from kelvin.crypto.pem_certificates import alternative_names, load_pair, read_chain

log = logging.getLogger(__name__)

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
RELOAD_INTERVAL_S: Final = 1.0

_State = tuple[tuple[int, int, int] | None, ...]


class BadIdentity(ValueError):
    """The files can't be used. The text names one and says why, without any part of a key."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """Paths of the files. URIs of this installation begin with `prefix`; the role follows."""

    certificate: Path
    key: Path
    authorities: Path
    prefix: str


class TlsIdentity:
    """The certificate of one process. Use it on one event loop. Only the constructor reads files on that loop."""

    def __init__(self, files: IdentityFiles, role: Role) -> None:
        """Load the files. Blocking. Raises BadIdentity."""
        self._files = files
        self._role = role
        self._state = self._logged_state = _state(files)
        self._pair = _load(files, role)

    def __repr__(self) -> str:
        return f"<TlsIdentity {self._role} {self._pair.serial:x}>"

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a listener. It accepts all roles of this installation, with the current certificate."""
        return _ReloadingContext(ssl.PROTOCOL_TLS_SERVER, lambda: self._pair.server, frozenset(Role))

    def client_context(self, role: Role) -> ssl.SSLContext:
        """Return a context for connections to processes of that role only. It uses the current certificate."""
        return _ReloadingContext(ssl.PROTOCOL_TLS_CLIENT, lambda: self._pair.client, frozenset((role,)))

    @property
    def expires_at(self) -> datetime.datetime:
        """Return when the certificate expires."""
        return self._pair.ends

    async def reload(self) -> None:
        """Read the files again if they have changed. Files that are incomplete, of another role, or not valid yet are
        logged once and retried at each call. Until they are good, the old certificate stays.
        """
        # Before reading, so that a change during the read is seen later
        state = await asyncio.to_thread(_state, self._files)
        if state == self._state:
            return
        try:
            pair = await asyncio.to_thread(_load, self._files, self._role)
            if pair.begins > _now():
                raise BadIdentity(f"{self._files.certificate} is not valid before {pair.begins}")
        except BadIdentity as bad:
            if state != self._logged_state:
                log.warning("keeping the current certificate", extra={"why": str(bad)})
            self._logged_state = state
        else:
            self._state, self._pair = state, pair
            log.info("the certificate was reloaded", extra={"serial": f"{pair.serial:x}"})

    async def reload_forever(self) -> None:
        """Reload every RELOAD_INTERVAL_S seconds until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.reload()


def peer_role(tls: ssl.SSLObject) -> Role:
    """Return the role of the peer. `tls` must come from a `TlsIdentity` context, after its handshake."""
    return cast(_RoleCheckedTls, tls).role


class _Context(ssl.SSLContext):
    """A context that knows the URI prefix of roles."""

    prefix: str


class _RoleCheckedTls(ssl.SSLObject):
    """A TLS object whose handshake succeeds only if the peer's role is in `wanted`."""

    wanted: frozenset[Role]
    role: Role

    def do_handshake(self) -> None:
        super().do_handshake()
        names = cast(Any, self.getpeercert() or {}).get("subjectAltName", ())
        uris = [value for kind, value in names if kind == "URI"]
        role = role_of(uris, cast(_Context, self.context).prefix)
        if role not in self.wanted:
            raise ssl.SSLCertVerificationError(1, f"the peer's role is {role or 'unknown'}")
        self.role = role


class _ReloadingContext(ssl.SSLContext):
    """One context for the life of a listener or pool. Each connection is wrapped by the current inner context."""

    _choose: Callable[[], ssl.SSLContext]
    _wanted: frozenset[Role]

    def __new__(
        cls, protocol: int, choose: Callable[[], ssl.SSLContext], wanted: frozenset[Role]
    ) -> "_ReloadingContext":
        made = super().__new__(cls, protocol)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made._choose, made._wanted = choose, wanted
        return made

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = self._choose().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        cast(_RoleCheckedTls, made).wanted = self._wanted
        return made

    def wrap_socket(self, *_: object, **__: object) -> ssl.SSLSocket:
        """Refuse: a blocking socket would not check the peer's role."""
        raise NotImplementedError("a blocking socket would not check the peer's role: use `wrap_bio`")


@dataclass(frozen=True, slots=True)
class _LoadedPair:
    server: ssl.SSLContext
    client: ssl.SSLContext
    serial: int
    begins: datetime.datetime
    ends: datetime.datetime


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _state(files: IdentityFiles) -> _State:
    """Return values that change when a file is written or replaced."""
    return tuple(_stat(path) for path in (files.certificate, files.key, files.authorities))


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _load(files: IdentityFiles, role: Role) -> _LoadedPair:
    """Load and check the files. Raises BadIdentity."""
    chain, key, authorities = (_read(path) for path in (files.certificate, files.key, files.authorities))
    leaf = _certificates(chain, files.certificate)[0]
    _certificates(authorities, files.authorities)
    if (named := role_of(_uris(leaf), files.prefix)) is not role:
        rule = f"is for {'no role' if named is None else f'the role {named}'}, not {files.prefix}{role}"
        raise BadIdentity(f"{files.certificate} {rule}")
    if leaf.not_valid_after_utc <= _now():
        raise BadIdentity(f"{files.certificate} has expired")
    try:
        pem = key + b"\n" + chain
        return _LoadedPair(
            _context(ssl.PROTOCOL_TLS_SERVER, pem, authorities, files.prefix),
            _context(ssl.PROTOCOL_TLS_CLIENT, pem, authorities, files.prefix),
            leaf.serial_number,
            leaf.not_valid_before_utc,
            leaf.not_valid_after_utc,
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise BadIdentity(f"{files.certificate} and {files.key.name}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadIdentity(f"{path} can't be read: {error.strerror}") from error


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return read_chain(pem)
    except ValueError as error:
        raise BadIdentity(f"{path} holds no certificate: {error}") from error


def _uris(leaf: x509.Certificate) -> list[str]:
    try:
        return alternative_names(leaf).get_values_for_type(x509.UniformResourceIdentifier)
    except ValueError:
        return []


def _context(protocol: int, pem: bytes, authorities: bytes, prefix: str) -> ssl.SSLContext:
    context = _Context(protocol)
    context.prefix = prefix
    context.sslobject_class = _RoleCheckedTls
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would skip the certificate check
    context.load_verify_locations(cadata=authorities.decode("ascii"))
    load_pair(context, pem)
    return context
