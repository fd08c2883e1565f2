"""Whom to evict: least recently used first, never what is in use. Pure; budgets and clocks are the callers'."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Key]):
    """Something that could go: its size in the budget's unit, and when it was last used."""

    key: Key
    size: int
    used_at: float


def choose(candidates: Iterable[Candidate[Key]], need: int) -> tuple[Key, ...] | None:
    """The oldest candidates whose sizes add up to `need`, oldest first and none too many; None where they can't."""
    if need <= 0:
        return ()  # without looking at them all: this is the common case, once per admission
    chosen: list[Key] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda each: each.used_at):
        if freed >= need:
            break
        chosen.append(candidate.key)
        freed += candidate.size
    return tuple(chosen) if freed >= need else None
