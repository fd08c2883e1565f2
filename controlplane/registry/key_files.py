"""Create and parse the texts of keys, and the files with the installation's first two keys.

A text is `kv-<id>-<secret>`. A file (mode 0600) is written once, whole, before the digest of its key is stored. If the
control plane crashes in between, the next start stores the digest of the existing file.
"""

import base64
import hashlib
import logging
import secrets
from pathlib import Path
from typing import Final

from kelvin.contracts.redaction import KEY_TEXT
from kelvin.process.atomic_file import pending_file

log = logging.getLogger(__name__)

_ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH: Final = 12


class BadKeyFile(RuntimeError):
    """A key file holds no key. It is never overwritten."""


def new_key_text() -> str:
    """Return a new key: a public id and 256 random bits."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    return f"kv-{key_id}-{secret}"


def parse_key_text(text: str) -> tuple[str, str]:
    """Return the key's id and the SHA-256 of its text. Raises BadKeyFile for a malformed text."""
    match = KEY_TEXT.fullmatch(text)
    if match is None:
        raise BadKeyFile("it does not hold a key of the form kv-<id>-<secret>")
    return match[1], hashlib.sha256(text.encode()).hexdigest()


def warn_of_damaged(path: Path) -> None:
    """Log a warning if the file holds no key. The key itself stays valid, because its digest is stored."""
    try:
        parse_key_text(path.read_text("latin-1").strip())
    except FileNotFoundError:  # its owner moved it
        return
    except (OSError, BadKeyFile) as error:
        what = "a key file is damaged: restore it from a backup. Its key stays valid, and no new key is created"
        log.warning(what, extra={"file": path.name, "error": str(error)})


def ensure_key_file(path: Path) -> str:
    """Return the key text in `path`; create the file if there is none. Readers see a whole key or no file."""
    try:
        return path.read_text("latin-1").strip()
    except FileNotFoundError:
        pass
    text = new_key_text()
    with pending_file(path, 0o600) as draft:
        draft.file.write(text.encode() + b"\n")
        try:
            draft.commit(replace=False)
        except FileExistsError:  # another process has created it meanwhile
            return path.read_text("latin-1").strip()
    return text
