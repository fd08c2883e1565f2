"""A file for a key that is about to be made: known to be writable before the key exists, for its owner alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kelvin.client import DoorClosed


@contextmanager
def key_file(path: Path, *, replace: bool) -> Iterator[Callable[[str], None]]:
    """Yields what writes the key: whole or not at all, mode 0600. Raises DoorClosed where the file can't be made."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if path.exists() and not replace:
        raise DoorClosed(f"{path} exists; a new key does not replace it")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DoorClosed(f"{path} can't be written: {error.strerror}") from error

    def write(secret: str) -> None:
        os.write(descriptor, secret.encode() + b"\n")
        os.fsync(descriptor)
        draft.rename(path)

    try:
        yield write
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
