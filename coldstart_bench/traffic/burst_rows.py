"""What a thousand requests at once for a model at zero came to: right answers, their order, and memory. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, align, at_least, at_most, cell
from coldstart_bench.statistics import jain, quantile_of
from coldstart_bench.traffic.memory import MIB, Memory, words

FAIR: Final = 0.95  # of 1, by Jain's index
IN_ORDER: Final = (
    0.05  # of the pairs of one tenant that are not served at once, that may be answered the other way round
)
EACH_BYTES: Final = 128 << 10  # that a request may take of the activator's memory while it waits


class Served(msgspec.Struct, frozen=True):
    """One tenant's: asked for in this order, all at once."""

    tenant: str
    asked: int
    right: int
    wrong: int  # with another text
    codes: dict[str, int]  # of those that were not answered
    first_s: float | None
    median_s: float | None
    last_s: float | None
    inversions: float | None  # share of its pairs that were answered the other way round


class BurstFigures(Figures, frozen=True):
    """Figures of all tenants, in the order in which they asked."""

    served: tuple[Served, ...]
    fairness: float | None  # Jain's index of the tenants' shares of the first half of the answers
    lag_p99_s: float | None  # of the open loop itself
    memory: Memory | None
    starts: int  # of the model, for all of them


def inversions(ends: Sequence[float], apart: int) -> float | None:
    """Of moments in the order of asking: the share of pairs, so far apart or farther, whose later one ended strictly
    earlier; None of no pair. Those that are served at the same time have no order.
    """
    found = [ends[later] < ends[earlier] for later in range(len(ends)) for earlier in range(later - apart + 1)]
    return sum(found) / len(found) if found else None


def fairness(answered: Sequence[tuple[float, str]], tenants: Sequence[str]) -> float | None:
    """Jain's index over tenants that asked for as much, of their counts in the first half; `answered` has ends."""
    first = [tenant for _, tenant in sorted(answered)[: len(answered) // 2]]
    return jain([first.count(tenant) for tenant in tenants]) if first else None


def served(tenant: str, asked: int, ends_s: Sequence[float], wrong: int, codes: dict[str, int], slots: int) -> Served:
    """`ends_s` are of right answers, in the order of asking; so many are served at once."""
    first, median, last = (quantile_of(ends_s, part) for part in (0.0, 0.5, 1.0))
    return Served(tenant, asked, len(ends_s), wrong, codes, first, median, last, inversions(ends_s, slots))


def judge(found: BurstFigures) -> tuple[Verdict, ...]:
    """The state is the number of requests."""
    asked = sum(one.asked for one in found.served)
    state = str(asked)
    wrong = asked - sum(one.right for one in found.served)
    swapped = max((one.inversions for one in found.served if one.inversions is not None), default=None)
    taken = None if found.memory is None else found.memory.grown / asked
    return (
        at_most("requests that were not answered right", wrong, 0, state),
        at_least("fairness between tenants, by Jain's index", found.fairness, FAIR, state),
        at_most("pairs of a tenant that were answered the other way round", swapped, IN_ORDER, state),
        at_most("bytes of the activator's memory for each request", taken, EACH_BYTES, state),
        at_most("starts of the model, off one by", abs(found.starts - 1), 0, state),
    )


def table(found: BurstFigures) -> str:
    """Return the figures as the text that a person reads."""
    rows: list[tuple[str, ...]] = [
        ("tenant", "asked", "right", "wrong", "first", "median", "last", "turned round", "not answered")
    ]
    for one in found.served:
        times = (cell(each, "{:.2f}s") for each in (one.first_s, one.median_s, one.last_s))
        codes = ", ".join(f"{code} {count}" for code, count in sorted(one.codes.items())) or "none"
        counts = map(str, (one.asked, one.right, one.wrong))
        rows.append((one.tenant, *counts, *times, cell(one.inversions, "{:.2%}"), codes))
    fair = cell(found.fairness, "{:.3f}")
    lines = [*align(rows), f"fairness between them over the first half of the answers (Jain): {fair}"]
    if found.memory is not None:
        each = found.memory.grown / sum(one.asked for one in found.served)
        lines.append(
            f"{words(found.memory)}; {each / 1024:.1f} KiB a request, {found.memory.grown / MIB:.1f} MiB in all"
        )
    return "\n".join(lines)
