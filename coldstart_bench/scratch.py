"""A directory of a bench's own."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Empty; gone when the block ends, with all that could be removed of it."""
    path = Path(tempfile.mkdtemp(prefix="kelvin-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
