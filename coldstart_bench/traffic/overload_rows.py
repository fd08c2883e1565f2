"""What more load than there is capacity came to: what was answered in time, who was refused, how memory went. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.exchange import Sent, held_up_s, lags_s
from coldstart_bench.traffic.memory import MIB, Sample, load_within
from coldstart_bench.traffic.processor import Load
from coldstart_bench.verdicts import Verdict, held, line_of, recorded_once

RANKS: Final = ("interactive", "standard", "batch")  # who is shed last comes first
REFUSALS: Final = frozenset((429, 503, 504))
GOODPUT: Final = 0.95  # of its peak, at the most load
ABLE: Final = 0.90  # of what the slots can do, or of what is asked for where that is less, at the most load
FLAT: Final = 0.05  # by which memory may grow between the middle and the last third of the most load
KEEPS_UP_S: Final = 0.05  # the loop's own lag up to which a step is what it says
OTHERS: Final = 0.1  # of a step, from which on it is said that others had the core
SETTLED: Final = 0.2  # of a step, before its figures count


class Step(msgspec.Struct, frozen=True):
    """One load, as a multiple of what the replicas can do; shares are of what was sent of a rank."""

    times: float
    rate: float  # requests a second, asked for
    sent: int
    good: int  # answered right, and in time
    late: int  # answered right, too late
    refused: dict[str, int]  # by code
    wrong: int  # neither right nor refused with a code that says what to do
    goodput: float  # tokens a second, of what was answered in time
    answered: dict[str, float]  # the share of each rank that was answered in time
    answered_p50_s: float | None
    answered_p99_s: float | None
    refused_p99_s: float | None  # how long it took to be told
    lag_p99_s: float | None  # of the open loop itself
    held_up_p99_s: float | None  # that a request waited for a connection, of which the door left none free
    door: Load | None  # of the activator's processor, from the first request to the last answer
    loop: Load | None  # and of the open loop's
    memory_middle: int | None  # peak of PSS in the middle third, bytes
    memory_last: int | None  # and in the last one


class OverloadReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    slots: int
    slot_s: float
    tokens: int  # of each answer
    deadline_s: float
    steps: tuple[Step, ...]
    unrecorded: int  # answers without a usage record; below 0, records without an answer
    memory_before: int | None
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


class Asked(msgspec.Struct, frozen=True):
    """What a step asked for."""

    times: float
    rate: float
    seconds: float
    tokens: int
    deadline_s: float


def step_of(
    asked: Asked,
    sent: Sequence[Sent],
    right: Sequence[bool],
    ranks: Sequence[str],
    samples: Sequence[Sample],
    began_ns: int,
    loop: Load | None = None,
) -> Step:
    """`right` and `ranks` are of each request of `sent`; `samples` are the door's, `loop` is the open loop's own."""
    in_time = [each.is_ok and fine and each.took_s <= asked.deadline_s for each, fine in zip(sent, right, strict=True)]
    answered = [each for each, fine in zip(sent, right, strict=True) if each.is_ok and fine]
    refused = [each for each in sent if _is_refusal(each)]
    begin_us, end_us = SETTLED * asked.seconds * 1e6, asked.seconds * 1e6
    counted = sum(fine and begin_us <= each.end_us < end_us for each, fine in zip(sent, in_time, strict=True))
    shares = _shares(in_time, ranks)
    took = [each.took_s for each in answered]
    return Step(
        times=asked.times,
        rate=asked.rate,
        sent=len(sent),
        good=sum(in_time),
        late=len(answered) - sum(in_time),
        refused=dict(Counter(each.code for each in refused)),
        wrong=len(sent) - len(answered) - len(refused),
        goodput=counted * asked.tokens / ((1 - SETTLED) * asked.seconds),
        answered=shares,
        answered_p50_s=quantile_of(took, 0.5),
        answered_p99_s=quantile_of(took, 0.99),
        refused_p99_s=quantile_of([each.took_s for each in refused], 0.99),
        lag_p99_s=quantile_of(lags_s(sent), 0.99),
        held_up_p99_s=quantile_of(held_up_s(sent), 0.99),
        door=load_within(samples, began_ns, max((each.end_us for each in sent), default=0), len(sent)),
        loop=loop,
        memory_middle=_peak(samples, began_ns, asked.seconds / 3, 2 * asked.seconds / 3),
        memory_last=_peak(samples, began_ns, 2 * asked.seconds / 3, asked.seconds),
    )


def _is_refusal(sent: Sent) -> bool:
    """With a code; who may come back is told when, or was told that its own time was over."""
    return (
        sent.status in REFUSALS
        and bool(sent.code)
        and (sent.retry_after or sent.status == 504 or "deadline" in sent.code)
    )


def _shares(in_time: Sequence[bool], ranks: Sequence[str]) -> dict[str, float]:
    asked, good = Counter(ranks), Counter(rank for rank, fine in zip(ranks, in_time, strict=True) if fine)
    return {rank: good[rank] / asked[rank] for rank in RANKS if asked[rank]}


def _peak(samples: Sequence[Sample], began_ns: int, from_s: float, to_s: float) -> int | None:
    found = [sample.pss for sample in samples if from_s <= (sample.at_ns - began_ns) / 1e9 < to_s]
    return max(found, default=None)


def judge(steps: Sequence[Step], able: float, unrecorded: int) -> tuple[Verdict, ...]:
    """Whether it holds or not; the state is the most load, as a multiple of what the replicas can do: `able` tokens a
    second.
    """
    most = max(steps, key=lambda step: step.times)
    peak = max(step.goodput for step in steps)
    done = most.goodput / (able * min(1.0, most.times))
    state = f"{most.times:g}x"
    wrong = float(sum(step.wrong for step in steps))
    grown = None
    if most.memory_middle is not None and most.memory_last is not None:
        grown = most.memory_last / most.memory_middle - 1
    return (
        held("goodput to its peak", 0, state, most.goodput / peak if peak else None, GOODPUT, at_least=True),
        held("goodput to what the slots can do", 0, state, done, ABLE, at_least=True),
        held("share by which memory still grew", 0, state, grown, FLAT, at_least=False),
        *(_order(most.answered, first, then, state) for first, then in pairwise(RANKS)),
        held("requests neither right nor rightly refused", 0, "all", wrong, 0.0, at_least=False),
        *recorded_once(unrecorded, "all"),
    )  # fmt: skip


def _order(answered: Mapping[str, float], first: str, then: str, state: str) -> Verdict:
    both = first in answered and then in answered
    more = answered[first] - answered[then] if both else None
    return held(f"share answered of {first} beyond that of {then}", 0, state, more, 0.0, at_least=True)


def notes_of(steps: Sequence[Step]) -> tuple[str, ...]:
    """What makes a step's figures something else than the activator's."""
    found = []
    for step in steps:
        if step.lag_p99_s is not None and step.lag_p99_s > KEEPS_UP_S:
            found.append(f"{step.times:g}x: the open loop was {step.lag_p99_s * 1e3:.0f} ms late itself (p99)")
        for load, whose in ((step.door, "the activator"), (step.loop, "the open loop")):
            if load is not None and load.waited > OTHERS:
                found.append(f"{step.times:g}x: {whose} waited for its core for {load.waited:.0%} of the time")
    return tuple(found)


def table(report: OverloadReport) -> str:
    """Return the report as the text that a person reads."""
    able = report.slots / report.slot_s
    lines = [
        f"{report.slots} slots of {report.slot_s * 1e3:g} ms and {report.tokens} tokens: {able:g} requests/s, "
        f"{able * report.tokens:g} tokens/s; answers are due within {report.deadline_s:g} s",
        f"{'load':>6} {'asked/s':>8} {'sent':>7} {'in time':>8} {'late':>6} {'wrong':>6} {'tokens/s':>9} "
        f"{'p50':>9} {'p99':>9} {'refused p99':>12} {'lag p99':>9} {'held up':>9} {'door us':>8} {'loop us':>8} "
        f"{'PSS':>7}  answered in time; refused",
    ]
    for step in report.steps:
        waits = (step.answered_p50_s, step.answered_p99_s, step.refused_p99_s, step.lag_p99_s, step.held_up_p99_s)
        cells = ["-" if each is None else f"{each * 1e3:.1f}ms" for each in waits]
        shares = ", ".join(f"{rank} {share:.0%}" for rank, share in step.answered.items())
        codes = ", ".join(f"{code} {count}" for code, count in sorted(step.refused.items())) or "nobody"
        loads = ["-" if load is None else f"{load.each_us:.0f}" for load in (step.door, step.loop)]
        memory = "-" if step.memory_last is None else f"{step.memory_last / MIB:.0f}M"
        lines.append(
            f"{step.times:>5g}x {step.rate:>8.0f} {step.sent:>7} {step.good:>8} {step.late:>6} {step.wrong:>6} "
            f"{step.goodput:>9.0f} {cells[0]:>9} {cells[1]:>9} {cells[2]:>12} {cells[3]:>9} {cells[4]:>9} "
            f"{loads[0]:>8} {loads[1]:>8} {memory:>7}  "
            f"{shares}; {codes}"
        )
    return "\n".join([*lines, *map(line_of, report.verdicts)])
