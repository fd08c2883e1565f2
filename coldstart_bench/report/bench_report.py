"""The report of every bench: its figures, claims checked against limits, missing figures, and the machine. Pure.

Each bench derives its figures from `Figures` and judges them by a list of claims. `bench_runner.py` runs it and writes
the report.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec

Key = tuple[int, str, str]  # size in bytes, state, system


class BenchFailed(Exception):
    """A run ended without a report. The text says why."""


class MissingFigure(msgspec.Struct, frozen=True):
    """A figure that is missing, and why. With a size it was requested and failed; without, this machine has none."""

    system: str
    reason: str
    size_bytes: int | None = None
    state: str | None = None


def failure_line(failed: MissingFigure) -> str:
    """Return the missing figure as a line for people."""
    if failed.size_bytes is None:
        return f"{failed.system}: not measured: {failed.reason}"
    state = "" if failed.state is None else f", {failed.state}"
    return f"{failed.system} at {failed.size_bytes / 1e9:.2f} GB{state}: {failed.reason}"


class ClaimVerdict(msgspec.Struct, frozen=True):
    """A claim, checked against its limit. `passed` is None if nothing was measured (`value` is None, too) or the claim
    does not apply to this size. If `decides` is False, the claim does not change the exit code.
    """

    claim: str
    size_bytes: int
    state: str
    value: float | None
    limit: float
    at_least: bool
    passed: bool | None
    decides: bool = True


def check_claim(
    claim: str,
    value: float | None,
    limit: float,
    state: str = "",
    size_bytes: int = 0,
    *,
    at_least: bool,
    is_checked: bool = True,
    decides: bool = True,
) -> ClaimVerdict:
    """Check `value` against `limit`. A value equal to the limit passes."""
    passed = None
    if is_checked and value is not None:
        passed = value >= limit if at_least else value <= limit
    return ClaimVerdict(claim, size_bytes, state, value, limit, at_least, passed, decides)


at_most: Final = partial(check_claim, at_least=False)
at_least: Final = partial(check_claim, at_least=True)


def recorded_once(unrecorded: int, state: str) -> tuple[ClaimVerdict, ClaimVerdict]:
    """Return claims about answers minus usage records. `unrecorded` is negative if there are more records."""
    return (
        at_most("answers without a usage record", max(0, unrecorded), 0, state),
        at_most("usage records beyond the answers", max(0, -unrecorded), 0, state),
    )


def ratio_or_none(over: float | None, under: float | None) -> float | None:
    """Return the ratio, or None if either value was not measured."""
    return None if over is None or under is None else over / under


def verdict_line(verdict: ClaimVerdict) -> str:
    """Return the verdict as a line for people. The size is left out if it is 0."""
    word = {True: "pass", False: "FAIL", None: ""}[verdict.passed]
    value = cell(verdict.value, "{:.3f}", none="not measured")
    rule = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
    size = f"{verdict.size_bytes / 1e9:5.2f} GB  " if verdict.size_bytes else ""
    return f"{word:4}  {size}{verdict.state:<4}  {verdict.claim}: {value} ({rule})"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run. Each bench adds its own fields."""

    failures: tuple[MissingFigure, ...] = ()
    notes: tuple[str, ...] = ()


F = TypeVar("F", bound=Figures)


class BenchReport(msgspec.Struct, Generic[F], frozen=True):
    """Figures, the claims about them, machine and commit. `load_before` is the load average before the run."""

    figures: F
    verdicts: tuple[ClaimVerdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None

    @property
    def passed(self) -> bool:
        """Whether every requested figure exists and no deciding claim failed. The exit code is then 0."""
        gaps = [failed for failed in self.figures.failures if failed.size_bytes is not None]
        return not gaps and not any(each.passed is False and each.decides for each in self.verdicts)

    def json(self) -> bytes:
        """Return one JSON object with the fields of the figures and of the report."""
        rest = msgspec.to_builtins(self)
        return msgspec.json.format(msgspec.json.encode(rest.pop("figures") | rest | {"passed": self.passed}))

    def text(self, table: str) -> str:
        """Return the report for people, below the bench's own `table`."""
        return "\n".join(
            [
                table,
                *map(failure_line, self.figures.failures),
                *map(verdict_line, self.verdicts),
                f"machine: {self.machine}  load before: {self.load_before:.2f}  commit: {self.commit}",
                *(f"note: {note}" for note in self.figures.notes),
            ]
        )


def cell(value: float | None, form: str, *, times: float = 1.0, none: str = "-") -> str:
    """Return a figure as text, multiplied by `times`, or `none` if it was not measured."""
    return none if value is None else form.format(value * times)


def align(rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines with columns of equal width: the first `left` left-aligned, the others right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
