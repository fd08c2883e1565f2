"""Which files go to one worker: those that share what takes long to start, so that it is started once, and ends with
the last of them: an installation that nobody asks anything needs the processor, too.
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
# Session fixtures that are processes, as tests and fixtures ask for them.
_ASKED: Final = re.compile(
    r"^(?:@pytest\.fixture[^\n]*\n)?def \w+\([^)]*?"
    r"\b((?:kelvin|watched|house): Installation|sealed: tuple\[Installation, Version\]|buckets: Buckets)",
    re.MULTILINE,
)
_TEST: Final = re.compile(r"^(?:@pytest\.fixture[^\n]*\n)def |^def test_", re.MULTILINE)
_DEEP: Final = re.compile(r"^pytestmark = .*\bpytest\.mark\.deep\b", re.MULTILINE)


@functools.cache
def shared_fixture_of(path: Path) -> str | None:
    """The first fixture of that kind which the file's tests ask for; None where they need none."""
    for found in _ASKED.finditer(text := path.read_text()):
        if _TEST.match(text, found.start()):
            return found[1]
    return None


def is_deep(path: Path) -> bool:
    """Whether the whole file is: then nothing of it runs without `-m deep`."""
    return _DEEP.search(path.read_text()) is not None


class SharedFixtures:
    """What the files of a group share, by name."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Kept {', '.join(self._made) or 'nothing'}>"

    def get(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """Made by who asks first. Raises what that raises."""
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        found: T = self._made[name]
        return found

    def close(self) -> None:
        """Nothing of it is left, and the next who asks has another."""
        self._made.clear()
        self._stack.close()


SHARED_FIXTURES: Final = SharedFixtures()


class FixtureGroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """By file, and files that share a fixture together."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return shared_fixture_of(ROOT / file) or file
