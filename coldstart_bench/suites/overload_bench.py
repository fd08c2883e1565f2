"""`kelvin bench overload`: raise the load step by step to ten times the replicas' capacity. What is still answered?"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import click
import msgspec

from coldstart_bench.harness.activator_testbed import (
    LONG_HEAD_TIMEOUT,
    MODEL,
    ActivatorUnderTest,
    OpenLoopClient,
    UpstreamConfig,
    cores_note,
    keys_for,
    one_model,
    running_activator,
    running_open_loop,
)
from coldstart_bench.harness.arrivals import constant
from coldstart_bench.harness.capacity_check import find_shortage
from coldstart_bench.harness.load_protocol import (
    OpenLoopPlan,
    RequestResult,
    RequestTemplate,
    connection_waits_s,
    send_delays_s,
)
from coldstart_bench.harness.process_stats import (
    MIB,
    CpuLoad,
    Sample,
    cpu_load_within,
    sampling_process,
    wait_for_sample,
)
from coldstart_bench.report.bench_report import (
    ClaimVerdict,
    Figures,
    align,
    at_least,
    at_most,
    cell,
    ratio_or_none,
    recorded_once,
)
from coldstart_bench.report.order_statistics import quantile_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.process.option_types import FiniteNumber

PRIORITIES: Final = ("interactive", "standard", "batch")  # the first is shed last
REFUSALS: Final = frozenset((429, 503, 504))
GOODPUT: Final = 0.95  # least goodput at the highest load, relative to its peak
SLOT_EFFICIENCY: Final = 0.90  # least goodput at the highest load, relative to capacity, or to demand if that is less
FLAT: Final = 0.05  # largest growth of memory between the middle and the last third of the highest load
KEEPS_UP_S: Final = 0.05  # with a larger delay of the open loop, the load of a step was not as planned
OTHERS: Final = 0.1  # with a larger share of waiting for the core, a step gets a note
SETTLED: Final = 0.2  # this first part of a step does not count for goodput
REQUEST_BYTES: Final = 1_000  # memory per request in this process and in the open loop
TENANT: Final = "loud"
TOKENS: Final = 16
MOST_CONNECTIONS: Final = 2048  # twice the queue limit; all are opened before a step, none during it


class LoadStep(msgspec.Struct, frozen=True):
    """Results at one load, given as a multiple of capacity. Shares are of the requests of one priority."""

    times: float
    rate: float  # requests per second that were due
    sent: int
    good: int  # correct answers in time
    late: int  # correct answers after the deadline
    refused: dict[str, int]  # by code
    wrong: int  # neither a correct answer nor a proper refusal
    goodput: float  # tokens per second of answers in time
    answered: dict[str, float]  # share of each priority that was answered in time
    answered_p50_s: float | None
    answered_p99_s: float | None
    refused_p99_s: float | None  # time until a refusal
    lag_p99_s: float | None  # delay of the open loop itself
    held_up_p99_s: float | None  # wait for a free connection
    door: CpuLoad | None  # CPU load of the activator, from the first request to the last answer
    loop: CpuLoad | None  # CPU load of the open loop
    memory_middle: int | None  # peak of PSS in the middle third, in bytes
    memory_last: int | None  # peak of PSS in the last third, in bytes


class OverloadFigures(Figures, frozen=True):
    """Figures of all steps."""

    slots: int
    slot_s: float
    tokens: int  # tokens per answer
    deadline_s: float
    steps: tuple[LoadStep, ...]
    unrecorded: int  # answers minus usage records; negative if there are more records
    memory_before: int | None

    @property
    def capacity_rps(self) -> float:
        """Requests per second that the slots can serve."""
        return self.slots / self.slot_s


class StepParameters(msgspec.Struct, frozen=True):
    """The planned load of a step."""

    times: float
    rate: float
    seconds: float
    tokens: int
    deadline_s: float


def measure_step(
    parameters: StepParameters,
    sent: Sequence[RequestResult],
    right: Sequence[bool],
    ranks: Sequence[str],
    samples: Sequence[Sample],
    began_ns: int,
    loop: CpuLoad | None = None,
) -> LoadStep:
    """Return the results of a step. `right` and `ranks` (priorities) belong to the requests of `sent`. `samples` are of
    the activator, `loop` is the CPU load of the open loop.
    """
    in_time = [
        each.is_ok and fine and each.took_s <= parameters.deadline_s for each, fine in zip(sent, right, strict=True)
    ]
    answered = [each for each, fine in zip(sent, right, strict=True) if each.is_ok and fine]
    refused = [each for each in sent if _is_refusal(each)]
    begin_us, end_us = SETTLED * parameters.seconds * 1e6, parameters.seconds * 1e6
    counted = sum(fine and begin_us <= each.end_us < end_us for each, fine in zip(sent, in_time, strict=True))
    shares = _shares(in_time, ranks)
    took = [each.took_s for each in answered]
    return LoadStep(
        times=parameters.times,
        rate=parameters.rate,
        sent=len(sent),
        good=sum(in_time),
        late=len(answered) - sum(in_time),
        refused=dict(Counter(each.code for each in refused)),
        wrong=len(sent) - len(answered) - len(refused),
        goodput=counted * parameters.tokens / ((1 - SETTLED) * parameters.seconds),
        answered=shares,
        answered_p50_s=quantile_of(took, 0.5),
        answered_p99_s=quantile_of(took, 0.99),
        refused_p99_s=quantile_of([each.took_s for each in refused], 0.99),
        lag_p99_s=quantile_of(send_delays_s(sent), 0.99),
        held_up_p99_s=quantile_of(connection_waits_s(sent), 0.99),
        door=cpu_load_within(samples, began_ns, max((each.end_us for each in sent), default=0), len(sent)),
        loop=loop,
        memory_middle=_peak(samples, began_ns, parameters.seconds / 3, 2 * parameters.seconds / 3),
        memory_last=_peak(samples, began_ns, 2 * parameters.seconds / 3, parameters.seconds),
    )


def _is_refusal(sent: RequestResult) -> bool:
    """Return whether it is a proper refusal: with a code, and with Retry-After unless its deadline is over."""
    return (
        sent.status in REFUSALS
        and bool(sent.code)
        and (sent.retry_after or sent.status == 504 or "deadline" in sent.code)
    )


def _shares(in_time: Sequence[bool], ranks: Sequence[str]) -> dict[str, float]:
    asked, good = Counter(ranks), Counter(rank for rank, fine in zip(ranks, in_time, strict=True) if fine)
    return {rank: good[rank] / asked[rank] for rank in PRIORITIES if asked[rank]}


def _peak(samples: Sequence[Sample], began_ns: int, from_s: float, to_s: float) -> int | None:
    found = [sample.pss for sample in samples if from_s <= (sample.at_ns - began_ns) / 1e9 < to_s]
    return max(found, default=None)


def judge(figures: OverloadFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. The state is the highest load, as a multiple of capacity."""
    most = max(figures.steps, key=lambda step: step.times)
    peak = max(step.goodput for step in figures.steps)
    done = most.goodput / (figures.capacity_rps * figures.tokens * min(1.0, most.times))
    state = f"{most.times:g}x"
    grown = ratio_or_none(most.memory_last, most.memory_middle)
    return (
        at_least("goodput to its peak", most.goodput / peak if peak else None, GOODPUT, state),
        at_least("goodput to what the slots can do", done, SLOT_EFFICIENCY, state),
        at_most("share by which memory still grew", None if grown is None else grown - 1, FLAT, state),
        *(_order(most.answered, first, then, state) for first, then in pairwise(PRIORITIES)),
        at_most("requests neither right nor rightly refused", sum(step.wrong for step in figures.steps), 0, "all"),
        *recorded_once(figures.unrecorded, "all"),
    )


def _order(answered: Mapping[str, float], first: str, then: str, state: str) -> ClaimVerdict:
    both = first in answered and then in answered
    more = answered[first] - answered[then] if both else None
    return at_least(f"share answered of {first} beyond that of {then}", more, 0, state)


def notes_of(steps: Sequence[LoadStep]) -> tuple[str, ...]:
    """Return notes about steps whose figures were affected by something other than the activator."""
    found = []
    for step in steps:
        if step.lag_p99_s is not None and step.lag_p99_s > KEEPS_UP_S:
            found.append(f"{step.times:g}x: the open loop was {step.lag_p99_s * 1e3:.0f} ms late itself (p99)")
        for load, whose in ((step.door, "the activator"), (step.loop, "the open loop")):
            if load is not None and load.waited > OTHERS:
                found.append(f"{step.times:g}x: {whose} waited for its core for {load.waited:.0%} of the time")
    return tuple(found)


def table(figures: OverloadFigures) -> str:
    """Return the figures as an aligned table."""
    head = (
        f"{figures.slots} slots of {figures.slot_s * 1e3:g} ms and {figures.tokens} tokens: "
        f"{figures.capacity_rps:g} requests/s, {figures.capacity_rps * figures.tokens:g} tokens/s; "
        f"answers are due within {figures.deadline_s:g} s"
    )
    counts = ("load", "asked/s", "sent", "in time", "late", "wrong", "tokens/s")
    rows: list[tuple[str, ...]] = [
        (*counts, "p50", "p99", "refused p99", "lag p99", "held up", "door us", "loop us", "PSS")
    ]
    for step in figures.steps:
        waits = (step.answered_p50_s, step.answered_p99_s, step.refused_p99_s, step.lag_p99_s, step.held_up_p99_s)
        loads = (None if load is None else load.each_us for load in (step.door, step.loop))
        rows.append(
            (
                f"{step.times:g}x",
                f"{step.rate:.0f}",
                *map(str, (step.sent, step.good, step.late, step.wrong)),
                f"{step.goodput:.0f}",
                *(cell(each, "{:.1f}ms", times=1e3) for each in waits),
                *(cell(each, "{:.0f}") for each in loads),
                cell(step.memory_last, "{:.0f}M", times=1 / MIB),
            )
        )
    ends = ["answered in time; refused", *map(_ends_of, figures.steps)]
    return "\n".join([head, *(f"{line}  {end}" for line, end in zip(align(rows, left=0), ends, strict=True))])


def _ends_of(step: LoadStep) -> str:
    shares = ", ".join(f"{rank} {share:.0%}" for rank, share in step.answered.items())
    codes = ", ".join(f"{code} {count}" for code, count in sorted(step.refused.items())) or "none"
    return f"{shares}; {codes}"


@dataclass(frozen=True, slots=True)
class OverloadPlan(BenchPlan):
    """Options of `kelvin bench overload`. `times` are multiples of capacity."""

    slots: int
    slot_s: float
    times: Sequence[float]
    seconds: float  # duration of each step
    deadline_s: float


def parse_multiples(words: str) -> tuple[float, ...]:
    """Parse numbers separated by commas and sort them. Raises ValueError with the wrong text."""
    try:
        found = sorted({float(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each <= 100 for each in found):
        raise ValueError(f"{words}: must be numbers above 0 and at most 100, separated by commas")
    return tuple(found)


def refusal(plan: OverloadPlan, free_disk: int, free_memory: int) -> str | None:
    """Return why memory does not suffice for the largest step, or None."""
    requests = max(plan.times) * plan.slots / plan.slot_s * plan.seconds
    return find_shortage(0, int(requests) * REQUEST_BYTES, free_disk, free_memory)


def run(plan: OverloadPlan, scratch: Path) -> OverloadFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    keys = keys_for((TENANT,))
    upstream = UpstreamConfig(one_model(keys, plan.slots), plan.slot_s)
    with (
        running_activator(scratch, upstream, LONG_HEAD_TIMEOUT) as door,
        running_open_loop(scratch) as loop,
        sampling_process(door.pid) as samples,
    ):
        before = samples[0].pss if samples else None
        steps = [_step(plan, times, door, loop, keys[TENANT], samples) for times in plan.times]
        recorded = sum(
            record.outcome == "ok" for record in door.upstream_report(sum(step.sent for step in steps)).records
        )
    return OverloadFigures(
        plan.slots,
        plan.slot_s,
        TOKENS,
        plan.deadline_s,
        tuple(steps),
        sum(step.good + step.late for step in steps) - recorded,
        before,
        notes=(cores_note(), *notes_of(steps)),
    )


def _step(
    plan: OverloadPlan, times: float, door: ActivatorUnderTest, loop: OpenLoopClient, key: str, samples: list[Sample]
) -> LoadStep:
    rate = times * plan.slots / plan.slot_s
    plan.tell(f"{times:g} times the capacity: {rate:.0f} requests/s for {plan.seconds:g} s")
    arrivals = tuple((at, number % len(PRIORITIES)) for number, at in enumerate(constant(rate, plan.seconds)))
    waiting = int(min(MOST_CONNECTIONS, plan.slots + rate * plan.deadline_s))
    payloads = tuple(payload(key, rank, plan.deadline_s) for rank in PRIORITIES)
    ran = loop.run(OpenLoopPlan(door.port, payloads, arrivals, waiting, waiting, plan.deadline_s + 30))
    parameters = StepParameters(times, rate, plan.seconds, TOKENS, plan.deadline_s)
    right = [ran.text(sent) == f"3 {TOKENS}" for sent in ran.sent]
    ranks = [PRIORITIES[sent.payload] for sent in ran.sent]
    wait_for_sample(samples, time.monotonic_ns())  # CPU load of a step needs a sample after its last answer
    return measure_step(parameters, ran.sent, right, ranks, samples, ran.began_ns, ran.load)


def payload(key: str, rank: str, deadline_s: float) -> RequestTemplate:
    """Return a completion request of this priority and deadline."""
    body = {"model": MODEL, "prompt": "w1 w2 w3", "max_tokens": TOKENS}
    headers = {"x-kelvin-priority": rank, "x-kelvin-deadline-ms": str(int(deadline_s * 1e3))}
    return RequestTemplate(key, "/v1/completions", json.dumps(body), headers, who=rank)


BENCH: Final = Bench(
    "overload",
    """Send more load than the replicas can serve, of all three priorities. Report which requests are answered in time
    or refused, and the memory. Exits with 1 if a claim fails.""",
    (
        option("--slots", 20, click.IntRange(1, 1024), "Slots of the replica."),
        option("--slot-ms", 100.0, FiniteNumber(1, 60_000), "Time per request.", "slot_s", convert=lambda ms: ms / 1e3),
        option("--times", "0.5,1,2,5,10", str, "Loads, as multiples of capacity.", convert=parse_multiples),
        option("--seconds", 10.0, FiniteNumber(0.5, 3600), "Duration of each step."),
        option(
            "--deadline-ms", 2000, click.IntRange(10, 600_000), "Deadline of each request.", "deadline_s",
            convert=lambda ms: ms / 1e3,
        ),
    ),
    OverloadPlan,
    run,
    table,
    judge,
    refusal,
)  # fmt: skip
