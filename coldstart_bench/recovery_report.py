"""What `kelvin drill recovery` says: what is stated, and each loss beside it, as JSON and for people. Pure."""

import json
from typing import Final

import msgspec


class Stated(msgspec.Struct, frozen=True):
    """What the documentation promises: how much is lost, and for how long nothing answers."""

    ledger_rpo_records: int = 0
    ledger_rto_s: float = 900.0
    registry_rpo_s: float = 300.0
    registry_rto_s: float = 1800.0


STATED: Final = Stated()


class Case(msgspec.Struct):
    """One loss and the way back. `failures` are sentences; none where all that is stated holds."""

    lost: str
    exposed_s: float  # from the last answer until no record was in the data directory alone
    registry_age_s: float  # of the newest backup when the installation was killed
    answered: int = 0  # requests, by the client's count
    billed: int = 0
    tokens_answered: int = 0
    tokens_billed: int = 0
    restore_s: float = 0.0
    ready_s: float = 0.0  # from the beginning of the restore to `kelvin up`'s ready line
    answer_s: float = 0.0  # and to the first right answer, from zero
    failures: list[str] = []


class DrillReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    stated: Stated
    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """Whether all that is stated was shown."""
        return not any(case.failures for case in self.cases)


def table(report: DrillReport) -> str:
    """Return the report as the text that a person reads."""
    lines = []
    for case in report.cases:
        lines += [
            f"{case.lost} is lost: {'as stated' if not case.failures else 'NOT AS STATED'}",
            f"  ledger: {case.answered} requests answered, {case.billed} billed; {case.tokens_answered} tokens, "
            f"{case.tokens_billed} billed; records were in the data directory alone for {case.exposed_s:.2f} s",
            f"  registry: the newest backup was {case.registry_age_s:.1f} s old",
            f"  back: restored after {case.restore_s:.1f} s, ready after {case.ready_s:.1f} s, "
            f"right answer after {case.answer_s:.1f} s",
            *(f"  {failure}" for failure in case.failures),
        ]
    return "\n".join(lines)


def report_json(report: DrillReport) -> str:
    """One object."""
    return json.dumps({**msgspec.to_builtins(report), "passed": report.passed}, indent=2)
