"""What injected damage came to: healed, refused by name, or served. Pure."""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from coldstart_bench.report import Figures, Verdict, align, at_least, at_most, ratio
from coldstart_bench.statistics import median_of

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
    uncounted: int  # by which the agent's own count is off


class IntegrityFigures(Figures, frozen=True):
    """Rates are bytes per second: verified from the NVMe tier, and by plain O_DIRECT reads of its files."""

    tallies: tuple[Tally, ...]
    mended: bool
    verified_rate: float
    floor_rate: float


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

    def row(tier: str) -> Tally:
        here = [each for each in injured if each.tier == tier]

        def count(fate: Fate) -> int:
            return sum(len(each.kinds) for each in here if each.fate == fate)

        return Tally(
            tier,
            injected=sum(len(each.kinds) for each in here),
            healed=count("healed"),
            refused=count("refused"),
            served_wrong=count("served wrong"),
            unexplained=count("unexplained"),
            uncounted=sum(abs(len(each.kinds) - each.counted) for each in here),
        )

    return tuple(map(row, TIERS))


def figures_of(
    injured: Sequence[Injured], mended: bool, verified: Sequence[float], floor: Sequence[float], notes: tuple[str, ...]
) -> IntegrityFigures:
    """`verified` and `floor` are rates of each round."""
    rates = median_of(verified).median, median_of(floor).median
    return IntegrityFigures(tallies_of(injured), mended, *rates, notes=notes)


def judge(found: IntegrityFigures) -> tuple[Verdict, ...]:
    """Nothing wrong is served, all that can be healed is, all else is refused by name, and everything is counted."""
    wrong = sum(each.served_wrong for each in found.tallies)
    unexplained = sum(each.unexplained for each in found.tallies)
    uncounted = sum(each.uncounted for each in found.tallies if each.tier == "nvme")
    rate = ratio(found.verified_rate, found.floor_rate)
    return (
        at_most("answers from damaged bytes", wrong, 0),
        at_most("damaged, and neither healed nor refused by name", unexplained, 0),
        at_most("damaged, and not counted by the agent", uncounted, 0, "nvme"),
        at_least("served right once the store is mended (1: yes)", float(found.mended), 1),
        at_least("rate of verified reads to plain ones", rate, 0.90, "nvme", asked=False),
    )


def table(found: IntegrityFigures) -> str:
    """Return the figures as the text that a person reads."""
    rows: list[tuple[str, ...]] = [("damaged in", "chunks", "healed", "refused", "served wrong", "unexplained")]
    for each in found.tallies:
        ends = (each.injected, each.healed, each.refused, each.served_wrong, each.unexplained)
        rows.append((each.tier, *map(str, ends)))
    rates = (
        f"NVMe, page cache dropped: {found.verified_rate / 1e9:.2f} GB/s verified, "
        f"{found.floor_rate / 1e9:.2f} GB/s of plain O_DIRECT reads of the same files"
    )
    return "\n".join([*align(rows), rates])
