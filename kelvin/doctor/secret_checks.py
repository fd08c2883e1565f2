"""Check what protects an installation: secret files, API keys, its certificates, backups. No secret is printed."""

import base64
import binascii
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kelvin.contracts.accounting.backup_reports import SUFFIX
from kelvin.contracts.redaction import KEY_TEXT
from kelvin.doctor.certificate_checks import times_of_leaf
from kelvin.doctor.finding_policy import DAY_S, Finding, FindingLevel
from kelvin.ipc.socket_directory import SocketDirectory

CONNECT_S: Final = 3.0
STATED_RPO_S: Final = 300
# 32 random bytes hold 30 distinct values on average. Fewer than 16 occur less than once in 10^14 keys.
MIN_DISTINCT_BYTES: Final = 16
RANDOM_BYTES: Final = 32
_KEYS: Final = ("admin.key", "default.key")
_SECRETS: Final = (*_KEYS, "tls/ca.key", "attest.key", "once.key", "kelvin.db", "kelvin.db-wal")


def check_secrets(data: Path) -> list[Finding]:
    """Return findings about the modes of the data directory and its secret files, and the randomness of API keys."""
    if not data.is_dir():
        return [Finding("secrets", FindingLevel.OK, "no data directory yet: nothing to guard")]
    status = data.stat()
    findings, count = list(judge_directory(stat.S_IMODE(status.st_mode))), 0
    for name in _SECRETS:
        path = data / name
        if not path.is_file():
            continue
        count += 1
        file = path.stat()
        findings += judge_file(name, stat.S_IMODE(file.st_mode), owned=file.st_uid == status.st_uid)
        if name in _KEYS:
            findings += judge_key(name, _distinct_bytes(path))
    return findings or [Finding("secrets", FindingLevel.OK, f"{count} private files; keys look random")]


def _distinct_bytes(path: Path) -> int | None:
    """Return how many distinct bytes the secret of an API key has, or None if the file holds no API key."""
    try:
        found = KEY_TEXT.fullmatch(path.read_text().strip())
        return None if found is None else len(set(base64.urlsafe_b64decode(found[2] + "=")))
    except (OSError, UnicodeDecodeError, binascii.Error):
        return None


def judge_directory(mode: int) -> Iterator[Finding]:
    """Judge the permission bits of the data directory."""
    if mode & 0o077:
        cost = "other users see names and sizes, and can open files with weak modes"
        yield Finding("secrets", FindingLevel.WARN, f"the data directory has mode {mode:04o}", cost, "chmod 0700 DATA")


def judge_file(name: str, mode: int, *, owned: bool) -> Iterator[Finding]:
    """Judge the permission bits of a secret file. `owned` says whether its owner also owns the data directory."""
    if mode & 0o077:
        cost = "other users of this machine can read it and act as you"
        again = "then replace the key (`kelvin keys rotate`), as it" if name in _KEYS else "which"
        mend = f"chmod 0600 DATA/{name}, {again} may have been read"
        yield Finding("secrets", FindingLevel.FAIL, f"{name} has mode {mode:04o}", cost, mend)
    if not owned:
        cost = "its owner can read and change it"
        mend = f"chown --reference=DATA DATA/{name}"
        yield Finding("secrets", FindingLevel.WARN, f"{name} belongs to another user", cost, mend)


def judge_key(name: str, different: int | None) -> Iterator[Finding]:
    """Judge how many distinct bytes the secret of an API key has. None means that the file holds no key."""
    if different is None:
        cost = "the command line can't authenticate, and the control plane does not start"
        yield Finding("keys", FindingLevel.FAIL, f"{name} holds no key", cost, "restore it from a backup")
    elif different < MIN_DISTINCT_BYTES:
        seen = f"the secret in {name} has {different} different bytes of {RANDOM_BYTES}"
        mend = f"`kelvin keys rotate ID --output DATA/{name}`"
        yield Finding("keys", FindingLevel.FAIL, seen, "it is not random, and can be guessed", mend)


def check_certificates(data: Path, *, running: bool) -> Iterator[Finding]:
    """Yield findings about the installation's own CA, and about the certificate that callers get now."""
    if (data / "ca.pem").exists():
        mend = "remove DATA/ca.pem and DATA/tls/ca.key, restart, and give callers the new ca.pem"
        left_s, begins_in_s = times_of_leaf(data / "ca.pem")
        yield judge_certificate("of the CA", left_s, mend, begins_in_s)
    if running:
        mend = "restart `kelvin up`: it should have been renewed"
        yield judge_certificate("that callers see", leaf_left_s(data), mend)


def leaf_left_s(data: Path) -> float | None:
    """Return the seconds until the front door's certificate expires. None if the handshake fails: no answer, another
    CA, or it has expired.
    """
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


def judge_certificate(name: str, left_s: float | None, mend: str, begins_in_s: float = 0.0) -> Finding:
    """Judge a certificate by the seconds until it expires (None: unreadable) and until it begins."""
    check = f"certificate {name}"
    if left_s is None:
        return Finding(check, FindingLevel.FAIL, "it can't be read", "no caller can connect", mend)
    if begins_in_s > 0:
        seen = f"not valid before {_format_span(begins_in_s)} from now: it was made by a clock ahead of this one"
        mend = "set the clock right: the activator makes it again within a minute"
        return Finding(check, FindingLevel.FAIL, seen, "every caller refuses it", mend)
    days = left_s / DAY_S
    if left_s <= 0:
        return Finding(check, FindingLevel.FAIL, f"expired {-days:.0f} days ago", "every caller refuses it", mend)
    level = FindingLevel.WARN if days < 30 else FindingLevel.OK
    seen = f"good for {days:.0f} days"
    return Finding(check, level, seen, "then every caller refuses it" if days < 30 else "", mend if days < 30 else "")


def _format_span(seconds: float) -> str:
    return f"{seconds / DAY_S:.0f} days" if seconds >= 2 * DAY_S else f"{seconds / 3600:.1f} hours"


def is_running(data: Path) -> bool:
    """Return whether a control plane listens on its socket. A hung control plane counts as running."""
    with suppress(OSError), closing(SocketDirectory(data / "run", is_ours=False)) as directory:
        directory.connect("control.sock", timeout_s=CONNECT_S).close()
        return True
    return False


POSTGRES_BACKUP_NOTE: Final = Finding(
    "backups",
    FindingLevel.NOTE,
    "KELVIN_DATABASE is set: Kelvin makes no backups of PostgreSQL",
    "only its own backups can restore it",
    "pg_dump, or its archive; and a copy of the secrets in DATA",
)


def check_backups(data: Path, place: str | None, every_s: float, *, running: bool) -> list[Finding]:
    """Return findings that say whether the recovery point stated in the documentation holds here."""
    if place is None:
        cost = "a lost disk takes registry, keys and bills with it"
        mend = "KELVIN_BACKUP=/another/disk, or `kelvin backup FILE` by a timer"
        return [Finding("backups", FindingLevel.WARN, "KELVIN_BACKUP is not set", cost, mend)]
    backup_directory, home = Path(place), data.absolute()
    now_s = time.time()
    written = (path.stat().st_mtime for path in backup_directory.glob(f"kelvin-*{SUFFIX}") if path.exists())
    # The control plane touches a backup that is still up to date. A time in the future comes from a wrong clock.
    newest_s = max((at_s for at_s in written if at_s <= now_s), default=None)
    same_disk = backup_directory.is_dir() and home.is_dir() and backup_directory.stat().st_dev == home.stat().st_dev
    age_s = None if newest_s is None else now_s - newest_s
    findings = [
        *judge_place(inside=backup_directory.is_relative_to(home), same_disk=same_disk),
        *judge_interval(every_s),
        *judge_age(age_s, every_s, running=running),
    ]
    return findings or [Finding("backups", FindingLevel.OK, f"the newest is {age_s or 0:.0f} s old")]


def judge_place(*, inside: bool, same_disk: bool) -> Iterator[Finding]:
    """Judge whether backups lie inside the data directory, or on its disk."""
    if inside or same_disk:
        where = "inside the data directory" if inside else "on the data directory's disk"
        cost = "they protect against a broken database, not against a broken disk"
        yield Finding("backups", FindingLevel.WARN, f"they are {where}", cost, "KELVIN_BACKUP on another disk")


def judge_interval(every_s: float) -> Iterator[Finding]:
    """Judge the seconds between two backups."""
    if every_s > STATED_RPO_S * 0.8:
        cost = f"up to {every_s:.0f} s of changes to models, keys and tenants may be lost, and the time of a backup"
        yield Finding("backups", FindingLevel.NOTE, f"one every {every_s:.0f} s", cost, "KELVIN_BACKUP_S=240")


def judge_age(age_s: float | None, every_s: float, *, running: bool) -> Iterator[Finding]:
    """Judge the age of the newest backup, or None if there is none. A stopped installation makes no backups."""
    if age_s is None:
        level = FindingLevel.FAIL if running else FindingLevel.NOTE
        yield Finding("backups", level, "none was made yet", "nothing can be restored", "`kelvin logs controlplane`")
    elif running and age_s > 3 * every_s + 60:
        seen = f"the newest is {age_s:.0f} s old, with one every {every_s:.0f} s"
        cost = "changes to models, keys and tenants since then may be lost"
        yield Finding("backups", FindingLevel.FAIL, seen, cost, "`kelvin logs controlplane` says why")
