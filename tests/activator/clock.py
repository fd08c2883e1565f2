"""A clock that stands until it is moved."""

from dataclasses import dataclass


@dataclass
class Clock:
    """Returns `now_s` (seconds) when it is called. A test moves it."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s
