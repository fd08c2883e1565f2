"""What a thousand requests at once for a model at zero came to: right answers, their order, and memory. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.statistics import jain, quantile_of
from coldstart_bench.traffic.memory import MIB, Memory, words
from coldstart_bench.verdicts import Verdict, held, line_of

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


class BurstReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    served: tuple[Served, ...]
    fairness: float | None  # Jain's index of the tenants' shares of the first half of the answers
    lag_p99_s: float | None  # of the open loop itself
    memory: Memory | None
    starts: int  # of the model, for all of them
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


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


def judge(each: Sequence[Served], fair: float | None, memory: Memory | None, starts: int) -> tuple[Verdict, ...]:
    """Whether it holds or not; the state is the number of requests."""
    asked = sum(one.asked for one in each)
    state = str(asked)
    wrong = float(asked - sum(one.right for one in each))
    swapped = max((one.inversions for one in each if one.inversions is not None), default=None)
    taken = None if memory is None else memory.grown / asked
    return (
        held("requests that were not answered right", 0, state, wrong, 0.0, at_least=False),
        held("fairness between tenants, by Jain's index", 0, state, fair, FAIR, at_least=True),
        held("pairs of a tenant that were answered the other way round", 0, state, swapped, IN_ORDER, at_least=False),
        held("bytes of the activator's memory for each request", 0, state, taken, EACH_BYTES, at_least=False),
        held("starts of the model, off one by", 0, state, float(abs(starts - 1)), 0.0, at_least=False),
    )


def table(report: BurstReport) -> str:
    """Return the report as the text that a person reads."""
    head = f"{'tenant':<8} {'asked':>6} {'right':>6} {'wrong':>6} {'first':>9} {'median':>9} {'last':>9}"
    lines = [f"{head} {'turned round':>13}  not answered"]
    for one in report.served:
        times = ["-" if each is None else f"{each:.2f}s" for each in (one.first_s, one.median_s, one.last_s)]
        turned = "-" if one.inversions is None else f"{one.inversions:.2%}"
        codes = ", ".join(f"{code} {count}" for code, count in sorted(one.codes.items())) or "none"
        lines.append(
            f"{one.tenant:<8} {one.asked:>6} {one.right:>6} {one.wrong:>6} "
            f"{times[0]:>9} {times[1]:>9} {times[2]:>9} {turned:>13}  {codes}"
        )
    if report.fairness is not None:
        lines.append(f"fairness between them over the first half of the answers (Jain): {report.fairness:.3f}")
    if report.memory is not None:
        each = report.memory.grown / sum(one.asked for one in report.served)
        lines.append(
            f"{words(report.memory)}; {each / 1024:.1f} KiB a request, {report.memory.grown / MIB:.1f} MiB in all"
        )
    return "\n".join([*lines, *map(line_of, report.verdicts)])
