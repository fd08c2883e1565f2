"""Assign test files to workers: files that share a slow fixture run in one worker, which starts it once.

The fixture ends with the last of these files, because an idle installation takes processor time too.
"""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from xdist.scheduler.loadfile import LoadFileScheduling

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[1]
# Session fixtures that run processes, as they appear in the parameters of tests and fixtures.
_ASKED: Final = re.compile(
    r"^(?:@pytest\.fixture[^\n]*\n)?def \w+\([^)]*?"
    r"\b((?:kelvin|watched|installation): Installation|sealed: tuple\[Installation, Version\]|buckets: Buckets)",
    re.MULTILINE,
)
_TEST: Final = re.compile(r"^(?:@pytest\.fixture[^\n]*\n)def |^def test_", re.MULTILINE)
_DEEP: Final = re.compile(r"^pytestmark = .*\bpytest\.mark\.deep\b", re.MULTILINE)


@functools.cache
def shared_fixture_of(path: Path) -> str | None:
    """Return the first shared fixture that the file's tests use; None if they use none."""
    for found in _ASKED.finditer(text := path.read_text()):
        if _TEST.match(text, found.start()):
            return found[1]
    return None


def is_deep(path: Path) -> bool:
    """Return whether the whole file is marked deep, so that none of it runs without `-m deep`."""
    return _DEEP.search(path.read_text()) is not None


class SharedFixtures:
    """The shared fixtures of a group of files, by name."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Kept {', '.join(self._made) or 'nothing'}>"

    def get(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """Return the fixture, making it on first use. Raises what `make` raises."""
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        found: T = self._made[name]
        return found

    def close(self) -> None:
        """Close all fixtures. The next `get` makes a new one."""
        self._made.clear()
        self._stack.close()


SHARED_FIXTURES: Final = SharedFixtures()


class FixtureGroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Schedule tests by file, and files that share a fixture together."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return shared_fixture_of(ROOT / file) or file
