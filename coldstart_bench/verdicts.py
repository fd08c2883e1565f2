"""Acceptance lines: a figure of a run held against the limit that is stated for it. Pure."""

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`passed` is None where nothing was measured (`value` is None, too), or the line asks nothing of this size."""

    claim: str
    size_bytes: int
    state: str
    value: float | None
    limit: float
    at_least: bool
    passed: bool | None


def held(
    claim: str, size_bytes: int, state: str, value: float | None, limit: float, *, at_least: bool, asked: bool = True
) -> Verdict:
    """`value` against `limit`, which itself is good enough."""
    good = None if value is None else (value >= limit if at_least else value <= limit)
    return Verdict(claim, size_bytes, state, value, limit, at_least, good if asked else None)


def recorded_once(unrecorded: int, state: str) -> tuple[Verdict, Verdict]:
    """Of answers less usage records: below 0, there are more records than answers."""
    return (
        held("answers without a usage record", 0, state, float(max(0, unrecorded)), 0.0, at_least=False),
        held("usage records beyond the answers", 0, state, float(max(0, -unrecorded)), 0.0, at_least=False),
    )


def ratio(over: float | None, under: float | None) -> float | None:
    """None where either was not measured."""
    return None if over is None or under is None else over / under


def line_of(verdict: Verdict) -> str:
    """For people; without a size where the line is of none."""
    word = {True: "pass", False: "FAIL", None: ""}[verdict.passed]
    value = "not measured" if verdict.value is None else f"{verdict.value:.3f}"
    rule = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
    size = f"{verdict.size_bytes / 1e9:5.2f} GB  " if verdict.size_bytes else ""
    return f"{word:4}  {size}{verdict.state:<4}  {verdict.claim}: {value} ({rule})"
