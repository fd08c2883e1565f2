"""What injected damage came to: healed, refused by name, or served. Pure."""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from coldstart_bench.statistics import median_of
from coldstart_bench.verdicts import Verdict, held, line_of, ratio

Fate = Literal["healed", "refused", "served wrong", "unexplained"]
TIERS: Final = ("nvme", "store")


class Injured(msgspec.Struct, frozen=True):
    """Damaged chunks of one request from zero, in a tier (where it is the store, in all tiers), and how that ended."""

    tier: str
    kinds: tuple[str, ...]
    fate: Fate
    counted: int  # faults by the agent's own count


class Tally(msgspec.Struct, frozen=True):
    """Injections of one tier by their end."""

    tier: str
    injected: int
    healed: int
    refused: int
    served_wrong: int
    unexplained: int


class IntegrityReport(msgspec.Struct, frozen=True):
    """What `--json` writes; bytes per second, verified from the NVMe tier and by plain O_DIRECT reads of its files."""

    tallies: tuple[Tally, ...]
    mended: bool
    verified_rate: float
    floor_rate: float
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


def fate_of(answer: str | None, refusal: str, right: str, digests: Sequence[str], *, healable: bool) -> Fate:
    """Of a request for a model with these chunks damaged. `answer` is its text, None where there was a `refusal`.

    What could be healed must be; a refusal has to name a chunk.
    """
    if answer is not None:
        if answer != right:
            return "served wrong"
        return "healed" if healable else "unexplained"
    named = any(digest in refusal for digest in digests)
    return "refused" if named and not healable else "unexplained"


def tallies_of(injured: Sequence[Injured]) -> tuple[Tally, ...]:
    """One row for each tier."""

    def count(tier: str, fate: Fate) -> int:
        return sum(len(each.kinds) for each in injured if (each.tier, each.fate) == (tier, fate))

    return tuple(
        Tally(
            tier,
            sum(len(each.kinds) for each in injured if each.tier == tier),
            count(tier, "healed"),
            count(tier, "refused"),
            count(tier, "served wrong"),
            count(tier, "unexplained"),
        )
        for tier in TIERS
    )


def judge(
    injured: Sequence[Injured], mended: bool, verified: Sequence[float], floor: Sequence[float]
) -> tuple[Verdict, ...]:
    """Nothing wrong is served, all that can be healed is, all else is refused by name, and everything is counted."""
    tallies = tallies_of(injured)
    wrong, unexplained = sum(each.served_wrong for each in tallies), sum(each.unexplained for each in tallies)
    uncounted = sum(abs(len(each.kinds) - each.counted) for each in injured if each.tier == "nvme")
    rate = ratio(median_of(verified).median, median_of(floor).median) if verified and floor else None
    return (
        held("answers from damaged bytes", 0, "", float(wrong), 0, at_least=False),
        held("damaged, and neither healed nor refused by name", 0, "", float(unexplained), 0, at_least=False),
        held("damaged, and not counted by the agent", 0, "nvme", float(uncounted), 0, at_least=False),
        held("served right once the store is mended (1: yes)", 0, "", float(mended), 1, at_least=True),
        held("rate of verified reads to plain ones", 0, "nvme", rate, 0.90, at_least=True, asked=False),
    )


def table(report: IntegrityReport) -> str:
    """Return the report as the text that a person reads."""
    head = f"{'damaged in':<12} {'chunks':>7} {'healed':>7} {'refused':>8} {'served wrong':>13} {'unexplained':>12}"
    lines = [
        head,
        *(
            f"{row.tier:<12} {row.injected:>7} {row.healed:>7} {row.refused:>8} {row.served_wrong:>13}"
            f" {row.unexplained:>12}"
            for row in report.tallies
        ),
    ]
    lines.append(
        f"NVMe, page cache dropped: {report.verified_rate / 1e9:.2f} GB/s verified, "
        f"{report.floor_rate / 1e9:.2f} GB/s of plain O_DIRECT reads of the same files"
    )
    return "\n".join([*lines, *(line_of(verdict) for verdict in report.verdicts)])
