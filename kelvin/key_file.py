"""A file for a key that is about to be made: known to be writable before the key exists, for its owner alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from kelvin.client import DoorClosed
from service.whole_file import drafted

_ROOM_BYTES: Final = 4096  # more than a key has


@contextmanager
def key_file(path: Path, *, replace: bool) -> Iterator[Callable[[str], None]]:
    """Yields what writes the key: whole or not at all, mode 0600. Raises DoorClosed where the file can't be made."""
    if path.exists() and not replace:
        raise DoorClosed(f"{path} exists; a new key does not replace it")
    with ExitStack() as stack:
        try:
            draft = stack.enter_context(drafted(path, 0o600))
            os.posix_fallocate(draft.file.fileno(), 0, _ROOM_BYTES)  # a full disk may take a new file and no bytes
        except OSError as error:
            raise DoorClosed(f"{path} can't be written: {error.strerror}") from error

        def write(secret: str) -> None:
            draft.file.write(secret.encode() + b"\n")
            draft.file.truncate()
            draft.keep()

        yield write
