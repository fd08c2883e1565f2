"""Settings of a process about its peers: their addresses, its own address, its identity."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kelvin.contracts.roles import Role
from kelvin.contracts.setting_parser import BadSetting, text
from kelvin.crypto.tls_identity import AUTHORITIES, CERTIFICATE, KEY, BadIdentity, IdentityFiles, TlsIdentity

CONTROL_SOCKET: Final = "control.sock"
SNAPSHOTTER_SOCKET: Final = "snapshotter.sock"
HEALTH_VARIABLE: Final = "KELVIN_HEALTH_LISTEN"
PREFIX: Final = "spiffe://kelvin/"
WILDCARD_HOSTS: Final = ("0.0.0.0", "::")  # noqa: S104
REMOTE: Final = "https://"
PLAIN: Final = "http://"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Peer settings of one process. Without `files`, it meets its peers only in the run directory."""

    files: IdentityFiles | None = None
    listen: tuple[str, int] | None = None
    control: str = CONTROL_SOCKET
    snapshotter: str = SNAPSHOTTER_SOCKET
    health: tuple[str, int] | None = None  # address of the health port


LOCAL_ONLY: Final = PeerSettings()


def is_remote(address: str) -> bool:
    """Return whether the address is on another host."""
    return address.startswith((REMOTE, PLAIN))


def read_peer_settings(
    env: Mapping[str, str], role: Role, listen: str | None = None, *, any_port: bool = False
) -> PeerSettings:
    """Read where the other processes are, and where this one listens.

    `listen` names the setting with the address at which this process serves other hosts. With `any_port` its port may
    be 0 (the kernel chooses one), and its host must be an address that other hosts can reach. Raises BadSetting, also
    if the certificate's files can't be used. A runtime has no health port: its pod's port is probed.
    """
    place = read_address(env, listen, any_port=any_port) if listen is not None and env.get(listen) else None
    if place is not None and any_port and place[0] in WILDCARD_HOSTS:
        raise BadSetting(str(listen), env[str(listen)], "must be an address that other hosts reach: they are told it")
    control, snapshotter = (
        _url(env, "KELVIN_CONTROL", CONTROL_SOCKET),
        _url(env, "KELVIN_SNAPSHOTTER", SNAPSHOTTER_SOCKET),
    )
    health = read_address(env, HEALTH_VARIABLE) if role is not Role.RUNTIME and env.get(HEALTH_VARIABLE) else None
    if place is None and control == CONTROL_SOCKET and snapshotter == SNAPSHOTTER_SOCKET:
        return PeerSettings(health=health)
    return PeerSettings(_files(env, role), place, control, snapshotter, health)


def load_identity(files: IdentityFiles, role: Role) -> TlsIdentity:
    """Load the TLS identity. Raises BadSetting."""
    try:
        return TlsIdentity(files, role)
    except BadIdentity as bad:
        raise BadSetting("KELVIN_INNER_TLS", str(files.certificate.parent), str(bad)) from bad


def read_address(env: Mapping[str, str], name: str, *, any_port: bool = False) -> tuple[str, int]:
    """Parse ADDRESS:PORT. With `any_port`, port 0 lets the kernel choose one. Raises BadSetting."""
    value = text(env, name)
    try:
        parts = urlsplit(f"//{value}")
        port = parts.port
        if parts.hostname and port is not None and (port or any_port) and parts.netloc == value and "@" not in value:
            return parts.hostname, port
    except ValueError:  # unmatched brackets, or an invalid port
        pass
    raise BadSetting(name, value, "must be ADDRESS:PORT")


def is_url(value: str) -> bool:
    """Return whether the text is https://HOST:PORT and nothing else."""
    try:
        parts = urlsplit(value)
        return (
            bool(parts.scheme == "https" and parts.hostname and parts.port and value == f"https://{parts.netloc}")
            and "@" not in value
        )
    except ValueError:
        return False


def listener_url(host: str, port: int) -> str:
    """Return the URL of a listener."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _url(env: Mapping[str, str], name: str, default: str) -> str:
    value = env.get(name, "")
    if value and not is_url(value):
        raise BadSetting(name, value, "must be https://HOST:PORT")
    return value or default


def _files(env: Mapping[str, str], role: Role) -> IdentityFiles:
    directory = _absolute(env, "KELVIN_INNER_TLS")
    role_directory = directory / role
    place = role_directory if role_directory.is_dir() else directory
    authorities = _absolute(env, "KELVIN_INNER_CA") if env.get("KELVIN_INNER_CA") else None
    prefix = text(env, "KELVIN_INNER_ID", PREFIX)
    if "://" not in prefix or not prefix.endswith("/") or not prefix.isascii():
        raise BadSetting("KELVIN_INNER_ID", prefix, "must be SCHEME://NAME/, what URIs begin with before the role")
    files = IdentityFiles(place / CERTIFICATE, place / KEY, authorities or place / AUTHORITIES, prefix)
    load_identity(files, role)  # refuse bad files when the process starts
    return files


def _absolute(env: Mapping[str, str], name: str) -> Path:
    path = Path(text(env, name))
    if not path.is_absolute():
        raise BadSetting(name, str(path), "must be an absolute path")
    return path
