"""`kelvin bench overload`: more than the replicas can do, step by step up to ten times: what is still answered?"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.traffic.arrivals import constant
from coldstart_bench.traffic.behind import MODEL, Behind, Door, Loop, cores_note, keys_for, looping, standing
from coldstart_bench.traffic.exchange import Payload, Plan
from coldstart_bench.traffic.memory import Sample, wait_for_sample, watching
from coldstart_bench.traffic.overload_rows import RANKS, Asked, OverloadFigures, Step, judge, notes_of, step_of, table
from service.arguments import Number

TENANT: Final = "loud"
TOKENS: Final = 16
MOST_CONNECTIONS: Final = 2048  # twice those that may wait; all are open before a step begins, and none after it has
SETTINGS: Final = {"KELVIN_HEAD_S": "60"}  # connections that are open before the beginning say nothing for a while


@dataclass(frozen=True, slots=True)
class OverloadPlan(BenchPlan):
    """Options of `kelvin bench overload`. `times` are multiples of what the slots can do."""

    slots: int
    slot_s: float
    times: Sequence[float]
    seconds: float  # of each step
    deadline_s: float


def times_of(words: str) -> tuple[float, ...]:
    """Numbers separated by commas, in order. Raises ValueError naming what is none."""
    try:
        found = sorted({float(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each <= 100 for each in found):
        raise ValueError(f"{words}: must be numbers above 0, of 100 at the most, separated by commas")
    return tuple(found)


def run(plan: OverloadPlan, scratch: Path) -> OverloadFigures:
    """Raises InstallationFailed, PeerFailed."""
    keys = keys_for((TENANT,))
    behind = Behind(keys, plan.slots, plan.slot_s)
    with standing(scratch, behind, SETTINGS) as door, looping(scratch) as loop, watching(door.pid) as samples:
        before = samples[0].pss if samples else None
        steps = [_step(plan, times, door, loop, keys[TENANT], samples) for times in plan.times]
        recorded = sum(record.outcome == "ok" for record in door.seen(sum(step.sent for step in steps)).records)
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


def _step(plan: OverloadPlan, times: float, door: Door, loop: Loop, key: str, samples: list[Sample]) -> Step:
    rate = times * plan.slots / plan.slot_s
    plan.tell(f"{times:g} times what they can do: {rate:.0f} requests/s for {plan.seconds:g} s")
    arrivals = tuple((at, number % len(RANKS)) for number, at in enumerate(constant(rate, plan.seconds)))
    waiting = int(min(MOST_CONNECTIONS, plan.slots + rate * plan.deadline_s))
    payloads = tuple(payload(key, rank, plan.deadline_s) for rank in RANKS)
    ran = loop.run(Plan(door.port, payloads, arrivals, waiting, waiting, plan.deadline_s + 30))
    asked = Asked(times, rate, plan.seconds, TOKENS, plan.deadline_s)
    right = [ran.text(sent) == f"3 {TOKENS}" for sent in ran.sent]
    ranks = [RANKS[sent.payload] for sent in ran.sent]
    wait_for_sample(samples, time.monotonic_ns())  # the cost of a step ends with a sample after its last answer
    return step_of(asked, ran.sent, right, ranks, samples, ran.began_ns, ran.load)


def payload(key: str, rank: str, deadline_s: float) -> Payload:
    """A completion of that rank, which is worth nothing after the deadline."""
    body = {"model": MODEL, "prompt": "w1 w2 w3", "max_tokens": TOKENS}
    headers = {"x-kelvin-priority": rank, "x-kelvin-deadline-ms": str(int(deadline_s * 1e3))}
    return Payload(key, "/v1/completions", json.dumps(body), headers, who=rank)


BENCH: Final = Bench(
    "overload",
    """More load than the replicas can do, of all three priorities: what is answered in time, who is refused, and how
    memory goes. Exit 1 where a line does not hold.""",
    (
        option("--slots", 20, click.IntRange(1, 1024), "Of the replica."),
        option("--slot-ms", 100.0, Number(1, 60_000), "Of each request.", "slot_s", convert=lambda ms: ms / 1e3),
        option("--times", "0.5,1,2,5,10", str, "What the slots can do, so often.", convert=times_of),
        option("--seconds", 10.0, Number(0.5, 3600), "Of each step."),
        option(
            "--deadline-ms", 2000, click.IntRange(10, 600_000), "Of each request.", "deadline_s",
            convert=lambda ms: ms / 1e3,
        ),
    ),
    OverloadPlan,
    run,
    table,
    judge,
)  # fmt: skip
