"""Directories of a bench's own."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory(beside: Path | None = None) -> Iterator[Path]:
    """Empty; gone when the block ends, with all that could be removed of it. Below $TMPDIR unless it says where."""
    with tempfile.TemporaryDirectory(prefix="kelvin-bench-", dir=beside, ignore_cleanup_errors=True) as path:
        yield Path(path)
