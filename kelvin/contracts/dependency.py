"""Dependencies of a process: timeout, circuit breaker and fallback of each. Pure.

Each service that depends on others has a table in its `dependencies.py`, and takes its timeouts from there.
`docs/operations/outages.md` lists them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency that may be unavailable. `timeout_s` limits each call unless the request's deadline is earlier."""

    name: str
    purpose: str
    timeout_s: float
    breaker: str  # what stops calls while the dependency fails
    fallback: str  # what callers see during that time
    indicator: str  # the metric that shows a failure


def dependency_table(dependencies: Sequence[Dependency]) -> str:
    """Return the dependencies as a Markdown table."""
    head = ("on", "for", "timeout", "breaker", "without it", "indicator")
    rows = [
        (each.name, each.purpose, f"{each.timeout_s:g} s", each.breaker, each.fallback, f"`{each.indicator}`")
        for each in dependencies
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
