"""The text of a key, and the files that hold the installation's first two.

The text is `kv-<id>-<secret>`. A file of mode 0600 is written once, whole, before its key's digest is stored: a crash
between the two is mended at the next start, from the file.
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
    """A key file holds something else than a key; it is never overwritten."""


def new_key_text() -> str:
    """A fresh key: a public id and 256 random bits."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    return f"kv-{key_id}-{secret}"


def parse_key_text(text: str) -> tuple[str, str]:
    """Its id, and the SHA-256 by which it is known. Raises BadKeyFile where it is none."""
    match = KEY_TEXT.fullmatch(text)
    if match is None:
        raise BadKeyFile("it does not hold a key of the form kv-<id>-<secret>")
    return match[1], hashlib.sha256(text.encode()).hexdigest()


def warn_of_damaged(path: Path) -> None:
    """Say in the log that this file holds no key. Its key, known here by its digest, stays good."""
    try:
        parse_key_text(path.read_text("latin-1").strip())
    except FileNotFoundError:  # its owner moved it
        return
    except (OSError, BadKeyFile) as error:
        what = "a key file is damaged: restore it from a backup; its key stays good, and no other is made"
        log.warning(what, extra={"file": path.name, "error": str(error)})


def ensure_key_file(path: Path) -> str:
    """The key text in `path`, made now where there was no such file. A reader sees a whole key or no file."""
    try:
        return path.read_text("latin-1").strip()
    except FileNotFoundError:
        pass
    text = new_key_text()
    with pending_file(path, 0o600) as draft:
        draft.file.write(text.encode() + b"\n")
        try:
            draft.commit(replace=False)
        except FileExistsError:  # another has made it meanwhile
            return path.read_text("latin-1").strip()
    return text
