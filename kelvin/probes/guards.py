"""Look at what guards an installation: modes, randomness of keys, certificates, backups. No secret leaves."""

import base64
import binascii
import os
import socket
import ssl
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from contracts.backup import SUFFIX
from contracts.secrets import KEY_TEXT
from kelvin.policy.guarding import BackupFacts, SecretFile
from service.certificate import read_chain

CONNECT_S: Final = 3.0
_KEYS: Final = ("admin.key", "default.key")
_SECRETS: Final = (*_KEYS, "tls/ca.key", "attest.key", "once.key", "kelvin.db", "kelvin.db-wal")


def look_at_secrets(data: Path) -> tuple[list[SecretFile], int | None]:
    """The files that are there, and the mode of the directory."""
    if not data.is_dir():
        return [], None
    owner = data.stat().st_uid
    files = []
    for name in _SECRETS:
        path = data / name
        if not path.is_file():
            continue
        status = path.stat()
        is_key, different = _look_at_key(path) if name in _KEYS else (True, None)
        files.append(SecretFile(name, stat.S_IMODE(status.st_mode), status.st_uid == owner, is_key, different))
    return files, stat.S_IMODE(data.stat().st_mode)


def _look_at_key(path: Path) -> tuple[bool, int | None]:
    """Whether it is the text of a key, and how many different bytes its secret has."""
    try:
        found = KEY_TEXT.fullmatch(path.read_text().strip())
        return (False, None) if found is None else (True, len(set(base64.urlsafe_b64decode(found[2] + "="))))
    except (OSError, UnicodeDecodeError, binascii.Error):
        return False, None


def authority_times_s(data: Path) -> tuple[float | None, float]:
    """Seconds until the CA's certificate expires, None where it can't be read, and until it is valid."""
    try:
        (certificate, *_) = read_chain((data / "ca.pem").read_bytes())
    except (OSError, ValueError):
        return None, 0.0
    now = datetime.now(UTC)
    left, begins_in = certificate.not_valid_after_utc - now, certificate.not_valid_before_utc - now
    return left.total_seconds(), begins_in.total_seconds()


def leaf_left_s(data: Path) -> float | None:
    """Of the certificate that callers are shown now; None where nobody answers, or not with one of this CA."""
    try:
        address = urlsplit((data / "url").read_text().strip())
        context = ssl.create_default_context(cafile=str(data / "ca.pem"))
        with (
            socket.create_connection((address.hostname or "", address.port or 443), CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=address.hostname) as secure,
        ):
            shown = secure.getpeercert()
    except (OSError, ValueError):
        return None
    return None if shown is None else ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()


def is_running(data: Path) -> bool:
    """Whether a control plane answers on its socket's path."""
    path = data / "run" / "control.sock"
    if not path.exists():
        return False
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_S)
            return probe.connect_ex(f"/proc/self/fd/{directory}/{path.name}") == 0
    finally:
        os.close(directory)


def look_at_backups(data: Path, place: str | None, every_s: float, running: bool) -> BackupFacts:
    """The age is that of the newest file: one that is still true is touched."""
    if place is None:
        return BackupFacts(None, None, every_s, same_disk=False, inside=False, running=running)
    there, home = Path(place), data.absolute()
    now_s = time.time()
    written = (path.stat().st_mtime for path in there.glob(f"kelvin-*{SUFFIX}") if path.exists())
    newest = max((at_s for at_s in written if at_s <= now_s), default=None)  # what is later had a wrong clock
    return BackupFacts(
        place=place,
        age_s=None if newest is None else now_s - newest,
        every_s=every_s,
        same_disk=there.is_dir() and home.is_dir() and there.stat().st_dev == home.stat().st_dev,
        inside=there.is_relative_to(home),
        running=running,
    )
