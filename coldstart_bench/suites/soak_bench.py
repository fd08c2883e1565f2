"""`kelvin bench soak`: run an installation under load while processes die, clients stall and the clock is stepped."""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from random import Random
from typing import Any, Final

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness.activator_testbed import OpenLoopClient, running_open_loop
from coldstart_bench.harness.arrivals import poisson
from coldstart_bench.harness.capacity_check import LEAST_BYTES
from coldstart_bench.harness.fault_injection import WHOLE_S, FaultEvent, FaultInjector, running_redis
from coldstart_bench.harness.installation import (
    Installation,
    InstallationFailed,
    find_leftovers,
    find_stray_sockets,
    find_unfinished_writes,
    run_command,
    running_installation,
)
from coldstart_bench.harness.load_protocol import CUT as WAS_CUT
from coldstart_bench.harness.load_protocol import (
    NO_DOOR,
    NO_END,
    LoadResult,
    OpenLoopPlan,
    ReaderKind,
    RequestResult,
    RequestTemplate,
)
from coldstart_bench.harness.polling import remaining
from coldstart_bench.harness.process_stats import MemoryUse, Sample, memory_line, memory_use, try_sample
from coldstart_bench.harness.program_runner import make_model
from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    CUT,
    GONE,
    BillBounds,
    BillTotals,
    RequestEnd,
    bill_bounds_of,
    bill_differences,
    bill_totals_of,
    refused_with,
)
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, at_least, at_most, cell, ratio_or_none
from coldstart_bench.report.order_statistics import quantile_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.process.option_types import FiniteNumber

WORD: Final = re.compile(r"w\d+|<s>|</s>|<unk>")
# Error codes that a client may get while the activator, or a process behind it, is down.
RIGHT_ERRORS: Final = frozenset(
    (
        "breaker_open",
        "deadline_exceeded",
        "deadline_too_short",
        "overloaded",
        "replica_lost",
        "slow_reader",
        "unavailable",
    )
)
MODEL: Final = "soak"
STALL_S: Final = 3
SHORT, LONG = 12, 120  # tokens
# Reader, tokens, and share of the requests in percent.
MIX: Final = (
    (ReaderKind.QUICK, SHORT, 80),
    (ReaderKind.QUICK, LONG, 8),
    (ReaderKind.SLOW, SHORT, 8),
    (ReaderKind.SILENT, LONG, 4),
)
SETTLED_S: Final = 60.0
PATIENCE_S: Final = 60.0
COMMAND_S: Final = 3600.0  # time limit of a command that reads all data of a long soak
NO_REDIS_NOTE: Final = "redis-server is not installed: it was not killed, and limits were not shared"


class SoakFigures(Figures, frozen=True):
    """How all requests ended, and what was found afterwards."""

    seconds: float
    sent: int
    answered: int  # complete answers; those with another text are in `wrong`, too
    told: dict[str, int]  # code to number of requests that were not answered
    wrong: tuple[str, ...]  # requests that ended in a way that is never allowed
    answered_p50_s: float | None
    answered_p99_s: float | None
    events: tuple[FaultEvent, ...]
    bill: tuple[str, ...]  # differences of the bill
    left: tuple[str, ...]  # leftovers
    memory: MemoryUse | None  # the activator's memory, before and at rest again
    again: float  # share of correct answers after the last fault


def find_wrong_end(sent: RequestResult, text: str, right: str, reader: ReaderKind) -> str | None:
    """Return why a request ended in a forbidden way, or None. Allowed: the right text, or a part and a valid code."""
    if sent.is_ok:
        return None if text == right else f"another text: {text[:60]!r}"
    if not right.startswith(text):
        return f"another text before {sent.code}: {text[:60]!r}"
    if sent.code in (WAS_CUT, NO_DOOR) or sent.code in RIGHT_ERRORS:
        return None
    if sent.code == NO_END and reader is ReaderKind.SILENT:
        return None
    return f"{sent.code or sent.status}"


def bill_bounds_for(sent: RequestResult, text: str, limit: int, reader: ReaderKind) -> BillBounds:
    """Return the bounds of the bill for one request.

    1. It never reached the activator: nothing.
    2. Answered: exactly the client's count.
    3. A slow reader may have missed tokens that the kernel buffered: any count up to the limit.
    4. Cut, or no end before the patience was over: as `bill_bounds_of` allows.
    5. Refused before the first token: one request or none, because a refusal before authentication has no record.
    6. Refused later: the client's count.
    """
    # (1)
    if sent.sent_us is None or sent.code == NO_DOOR:
        return BillBounds()
    count = len(WORD.findall(text))
    unread = 0 if reader is ReaderKind.QUICK else limit
    # (2)
    if sent.is_ok:
        return bill_bounds_of(RequestEnd(ANSWERED, count, limit))
    # (3)
    if reader is ReaderKind.SILENT or (reader is ReaderKind.SLOW and sent.code == WAS_CUT):
        least, most = max(0, count - limit), min(limit, count + unread)
        return BillBounds((0, 1), (0, 1), (least, most))
    # (4)
    if sent.code in (WAS_CUT, NO_END):
        way = CUT if sent.code == WAS_CUT else GONE
        return bill_bounds_of(RequestEnd(way, count, limit, whole=count >= limit, unread=unread))
    # (5)
    if not count:
        return BillBounds((0, 1), (0, 0), (0, 0))
    # (6)
    return bill_bounds_of(RequestEnd(refused_with(sent.code), count, limit))


def figures_of(seconds: float, sent: Sequence[RequestResult], **report: Any) -> SoakFigures:
    """Return the figures, with counts over the requests. `report` has the other fields."""
    took = [each.took_s for each in sent if each.is_ok]
    codes = Counter(each.code for each in sent if not each.is_ok)
    p50_s, p99_s = quantile_of(took, 0.5), quantile_of(took, 0.99)
    return SoakFigures(seconds, len(sent), len(took), dict(codes), answered_p50_s=p50_s, answered_p99_s=p99_s, **report)


def judge(figures: SoakFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. The state is the number of faults."""
    state = f"{len(figures.events)} faults"
    down = sum(event.whole_after_s is None for event in figures.events)
    done = sum(not event.failed for event in figures.events)
    share = ratio_or_none(figures.answered, figures.sent or None)
    return (
        at_most("requests that ended neither right nor rightly", len(figures.wrong), 0, state),
        at_most("differences of the bill from what clients counted", len(figures.bill), 0, state),
        at_most("faults after which not all was ready again", down, 0, state),
        at_least("faults that were done", done, max(1, len(figures.events) // 2), state),
        at_most("things that are left", len(figures.left), 0, state),
        at_least("share of requests after the last fault that were answered right", figures.again, 1, state),
        at_least("share of requests that were answered", share, 0, state, is_checked=False),
    )


def table(figures: SoakFigures) -> str:
    """Return the figures as text for people."""
    codes = ", ".join(f"{code} {count}" for code, count in sorted(figures.told.items())) or "none"
    p50, p99 = (cell(each, "{:.2f} s") for each in (figures.answered_p50_s, figures.answered_p99_s))
    lines = [
        f"{figures.sent} requests in {figures.seconds:g} s: {figures.answered} answered "
        f"({p50} at the median, {p99} p99); "
        f"ended otherwise: {codes}"
    ]
    for event in figures.events:
        after = cell(event.whole_after_s, "ready again after {:.2f} s", none="NOT READY AGAIN")
        failed = f"; could not be done: {event.failed}" if event.failed else ""
        lines.append(f"  {event.at_s:7.1f} s  {event.what:<24} {after}{failed}")
    lines += [f"wrong: {each}" for each in figures.wrong[:10]]
    lines += [f"bill: {each}" for each in figures.bill]
    lines += [f"left: {each}" for each in figures.left]
    return "\n".join([*lines, memory_line(figures.memory)])


@dataclass(frozen=True, slots=True)
class SoakPlan(BenchPlan):
    """Duration, request rate, and interval of faults."""

    seconds: float
    rate: float  # requests per second
    every_s: float  # seconds between faults
    seed: int


def run(plan: SoakPlan, scratch: Path) -> SoakFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    data, clock = scratch / "data", SteppedClock(scratch / "clock")
    plan.tell("making and pushing a model")
    make_model(scratch / "model", LEAST_BYTES // 2, 1, sharp=True)
    settings = {**clock.settings, "KELVIN_STALL_S": str(STALL_S), "KELVIN_CHUNK_BYTES": str(1 << 20)}
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_redis(scratch))
        settings |= {} if redis is None else {"KELVIN_REDIS": redis.url}
        loop = stack.enter_context(running_open_loop(scratch))
        with running_installation(data, settings=settings) as kelvin:
            kelvin.push(scratch / "model", MODEL, replicas=1)
            payloads = _payloads(kelvin)
            right = loop.reference_texts(kelvin.port, payloads, PATIENCE_S)
            before = _settled(kelvin)
            samples = _sampled(kelvin)
            faults = FaultInjector(kelvin, MODEL, redis, clock)
            ran, events = _run_under_faults(plan, kelvin, loop, payloads, faults)
            clock.step(0)
            faults.recovery_time_s(time.monotonic())
            # Refusals are allowed under faults, so also check that requests succeed afterwards.
            after = loop.run_sequentially(kelvin.port, payloads, PATIENCE_S)
            bounds = _bounds(ran, payloads) + _bounds(after, payloads, ReaderKind.QUICK)
            _differences(kelvin, before, bounds)  # waits until all usage is reported, or until SETTLED_S
            samples += _sampled(kelvin)
            bill = _closing(kelvin)
            bill += _differences(kelvin, before, bounds)  # now also with the last records of the replicas
            left = find_unfinished_writes(data) + find_stray_sockets(data)
        left += find_leftovers(data)
    wrong = [
        f"request {number} ({payloads[sent.payload].reader}): {why}"
        for number, sent in enumerate(ran.sent)
        if (why := find_wrong_end(sent, ran.text(sent), right[sent.payload], payloads[sent.payload].reader)) is not None
    ]
    return figures_of(
        plan.seconds,
        ran.sent,
        wrong=tuple(wrong),
        events=tuple(events),
        bill=tuple(bill),
        left=tuple(left),
        memory=memory_use(samples),
        again=sum(map(eq, after.answers(), right)) / len(right),
        notes=() if redis is not None else (NO_REDIS_NOTE,),
    )


def _payloads(kelvin: Installation) -> tuple[RequestTemplate, ...]:
    found = []
    for number, (reader, tokens, _) in enumerate(MIX):
        prompt = " ".join(f"w{10 * number + place}" for place in range(4))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        found.append(RequestTemplate(kelvin.key, "/v1/completions", json.dumps(body), reader=reader))
    return tuple(found)


def _run_under_faults(
    plan: SoakPlan,
    kelvin: Installation,
    loop: OpenLoopClient,
    payloads: Sequence[RequestTemplate],
    faults: FaultInjector,
) -> tuple[LoadResult, list[FaultEvent]]:
    chance = Random(plan.seed)  # noqa: S311 - no secret
    due_us = poisson(plan.rate, plan.seconds, chance)
    payload_numbers = chance.choices(range(len(MIX)), [share for _, _, share in MIX], k=len(due_us))
    load_plan = OpenLoopPlan(
        kelvin.port, tuple(payloads), tuple(zip(due_us, payload_numbers, strict=True)), 4, 512, PATIENCE_S
    )
    plan.tell(f"{len(due_us)} requests in {plan.seconds:g} s, a fault every {plan.every_s:g} s (seed {plan.seed})")
    with ThreadPoolExecutor(1, "load") as pool:
        load = pool.submit(loop.run, load_plan)

        def has_failed() -> bool:
            return load.done() and load.exception() is not None

        events = faults.run(plan.every_s, time.monotonic() + plan.seconds, has_failed)
        return load.result(), events


def _bounds(ran: LoadResult, payloads: Sequence[RequestTemplate], reader: ReaderKind | None = None) -> BillBounds:
    """Return the bounds of the bill for all requests. `reader` overrides the readers of their payloads."""
    found = BillBounds()
    for sent in ran.sent:
        payload = payloads[sent.payload]
        limit = int(json.loads(payload.body)["max_tokens"])
        found += bill_bounds_for(sent, ran.text(sent), limit, reader or payload.reader)
    return found


def billed(kelvin: Installation) -> BillTotals:
    """Return the bill of all months since the installation began: a soak may cross the end of a month."""
    return sum(map(bill_totals_of, kelvin.bills(kelvin.began_s)), BillTotals())


def _settled(kelvin: Installation) -> BillTotals:
    """Return the bill once the reference requests are on it."""
    kelvin.wait(lambda: billed(kelvin).requests >= len(MIX), "what was asked is on the bill")
    return billed(kelvin)


def _differences(kelvin: Installation, before: BillTotals, bounds: BillBounds) -> list[str]:
    """Return the differences of the bill, after it had SETTLED_S to agree."""

    def wrong() -> list[str]:
        try:
            return bill_differences(before, billed(kelvin), bounds)
        except InstallationFailed as away:
            return [f"the bill can't be asked for: {away}"]

    return remaining(wrong, SETTLED_S)


def _closing(kelvin: Installation) -> list[str]:
    """Stop the model, then return what the commands that check bill, ledger and store find."""
    kelvin.scale_to_zero(MODEL)

    def is_closed() -> bool:
        return not any(bill["open_runtimes"] for bill in kelvin.bills(kelvin.began_s))

    kelvin.wait(is_closed, "every life is recorded", WHOLE_S)
    found: list[str] = []
    for words in (("billing", "report"), ("billing", "verify"), ("fsck",)):
        # Retry: the last records of a replica arrive later.
        found += filter(None, [remaining(partial(wrong_command, kelvin.data, *words), SETTLED_S)])
    return found


def wrong_command(data: Path, *words: str, limit_s: float = COMMAND_S) -> str | None:
    """Return what is wrong if a command does not exit with 0, else None."""
    try:
        code, out, err = run_command(data, *words, limit_s=limit_s)
    except InstallationFailed as failed:
        return str(failed)
    if code == 0:
        return None
    return f"kelvin {' '.join(words)} ends with {code}: {(err or out).strip()[-300:]}"


def _sampled(kelvin: Installation) -> list[Sample]:
    sample = try_sample(kelvin.pid_of("activator"))
    return [] if sample is None else [sample]


BENCH: Final = Bench(
    "soak",
    """Run an installation under load while its processes are killed in turn, clients stall and the clock is stepped.
    Report how each request ended, and whether the bill agrees. Exits with 1 if a claim fails.""",
    (
        option("--seconds", 600.0, FiniteNumber(5, 604_800), "Duration of the load."),
        option("--rate", 10.0, FiniteNumber(0.1, 1000), "Requests per second."),
        option("--every", 10.0, FiniteNumber(1, 3600), "Seconds between faults.", "every_s"),
        option("--seed", 1, int, "Seed of the random load."),
    ),
    SoakPlan,
    run,
    table,
    judge,
)
