"""What `kelvin drill recovery` found: what is stated, and each loss beside it. Pure."""

from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, at_most, cell


class Stated(msgspec.Struct, frozen=True):
    """What the documentation promises: how much is lost, and for how long nothing answers."""

    ledger_rpo_records: int = 0
    ledger_rto_s: float = 900.0
    registry_rpo_s: float = 300.0
    registry_rto_s: float = 1800.0


STATED: Final = Stated()


class Case(msgspec.Struct):
    """One loss and the way back. `failures` are sentences on what is not as it was before; times are None where it did
    not get so far.
    """

    lost: str
    exposed_s: float  # from the last answer until no record was in the data directory alone
    registry_age_s: float  # of the newest backup when the installation was killed
    answered: int = 0  # requests, by the client's count
    billed: int = 0
    tokens_answered: int = 0
    tokens_billed: int = 0
    restore_s: float | None = None
    ready_s: float | None = None  # from the beginning of the restore to `kelvin up`'s ready line
    answer_s: float | None = None  # and to the first right answer, from zero
    failures: list[str] = []


class DrillFigures(Figures, frozen=True):
    """All losses. There was a backup every `every_s`."""

    stated: Stated
    every_s: float
    cases: tuple[Case, ...]


def judge(found: DrillFigures) -> tuple[Verdict, ...]:
    """The state is what was lost."""
    return tuple(verdict for case in found.cases for verdict in _judged(case, found.stated, found.every_s))


def _judged(case: Case, stated: Stated, every_s: float) -> tuple[Verdict, ...]:
    """A backup may take a fifth of the stated time beside the interval of the drill."""
    records, tokens = abs(case.answered - case.billed), abs(case.tokens_answered - case.tokens_billed)
    age_s = every_s + stated.registry_rpo_s / 5
    return (
        at_most("requests by which the bill is off the client's count", records, stated.ledger_rpo_records, case.lost),
        at_most("tokens by which the bill is off the client's count", tokens, 0, case.lost),
        at_most("seconds until the ledger was back", case.answer_s, stated.ledger_rto_s, case.lost),
        at_most("seconds until the registry was back", case.ready_s, stated.registry_rto_s, case.lost),
        at_most("seconds since the newest backup", case.registry_age_s, age_s, case.lost),
        at_most("other differences from before", len(case.failures), 0, case.lost),
    )


def table(found: DrillFigures) -> str:
    """Return the figures as the text that a person reads."""
    lines = []
    for case in found.cases:
        restored, ready, right = (cell(each, "{:.1f} s") for each in (case.restore_s, case.ready_s, case.answer_s))
        lines += [
            f"{case.lost} is lost",
            f"  ledger: {case.answered} requests answered, {case.billed} billed; {case.tokens_answered} tokens, "
            f"{case.tokens_billed} billed; records were in the data directory alone for {case.exposed_s:.2f} s",
            f"  registry: the newest backup was {case.registry_age_s:.1f} s old",
            f"  back: restored after {restored}, ready after {ready}, right answer after {right}",
            *(f"  {failure}" for failure in case.failures),
        ]
    return "\n".join(lines)
