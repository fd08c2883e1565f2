"""The text of a key, and the files that hold the installation's first two.

The text is `kv-<id>-<secret>`. A file of mode 0600 is written once, whole, before its key's digest is stored: a crash
between the two is mended at the next start, from the file.
"""

import base64
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from contracts.secrets import KEY_TEXT

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


def ensure_key_file(path: Path) -> str:
    """The key text in `path`, made now where there was no such file. A reader sees a whole key or no file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    text, draft = new_key_text(), path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)  # fails where another has made it, unlike a rename
    except FileExistsError:
        return path.read_text().strip()
    finally:
        draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return text
