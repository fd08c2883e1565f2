"""What a process depends on: how long it waits for each, what stops it from asking, and what it does without. Pure.

Each service that depends on others has its table in `dependencies.py`, and its timeouts from there;
`docs/operations/outages.md` has them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dependency:
    """One thing that may be away. `timeout_s` bounds each call, where no request's own deadline does before it."""

    name: str
    purpose: str
    timeout_s: float
    breaker: str  # what ends the asking while it fails
    fallback: str  # what callers see meanwhile
    indicator: str  # the metric that shows it


def dependency_table(dependencies: Sequence[Dependency]) -> str:
    """In Markdown."""
    head = ("on", "for", "timeout", "breaker", "without it", "indicator")
    rows = [
        (each.name, each.purpose, f"{each.timeout_s:g} s", each.breaker, each.fallback, f"`{each.indicator}`")
        for each in dependencies
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
