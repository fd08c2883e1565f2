"""Which steps from line to line a call takes through our own packages: what a fuzzer calls new.

By `sys.settrace`, as it is in every Python: `sys.monitoring` would be quicker, and came with 3.12. C code that we call
shows itself in what it refuses: the shape of a refusal counts as a step, too.
"""

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[2]
# By name: an environment that lies in the checkout is not ours.
_OURS: Final = tuple(f"{path.parent}/" for path in _ROOT.glob("*/__init__.py") if path.parent.name != "tests")
_PARTICULARS: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[0-9]+|\(.*\)|=.*?:")

Step = tuple[CodeType | str, int, int]


class Coverage:
    """All steps that were ever taken."""

    def __init__(self) -> None:
        self._seen: set[Step] = set()

    def __repr__(self) -> str:
        return f"<Coverage {len(self._seen)} steps>"

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, call: Callable[[], str]) -> bool:
        """Make the call, which returns what it was refused with, if it was. Whether a step of it was never taken."""
        before, outer, collects = len(self._seen), sys.gettrace(), gc.isenabled()
        gc.disable()  # a finalizer of somebody else's is no step of this call
        sys.settrace(self._enter)
        try:
            said = call()
        finally:
            sys.settrace(outer)
            if collects:
                gc.enable()
        self._seen.add((_PARTICULARS.sub("#", said)[:120], 0, 0))
        return len(self._seen) > before

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return None
        last, seen = 0, self._seen

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "line":
                seen.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step
