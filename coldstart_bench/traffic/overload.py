"""`kelvin bench overload`: more than the replicas can do, step by step up to ten times: what is still answered?"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coldstart_bench.environment import commit, load_1m, machine
from coldstart_bench.scratch import scratch_directory
from coldstart_bench.traffic.arrivals import constant
from coldstart_bench.traffic.behind import MODEL, Behind, Door, Loop, cores_note, keys_for, looping, standing
from coldstart_bench.traffic.exchange import Payload, Plan
from coldstart_bench.traffic.memory import Sample, wait_for_sample, watching
from coldstart_bench.traffic.overload_rows import RANKS, Asked, OverloadReport, Step, judge, notes_of, step_of

TENANT: Final = "loud"
TOKENS: Final = 16
MOST_CONNECTIONS: Final = 2048  # twice those that may wait; all are open before a step begins, and none after it has
SETTINGS: Final = {"KELVIN_HEAD_S": "60"}  # connections that are open before the beginning say nothing for a while


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What to send; `times` are multiples of what the slots can do. `tell` hears one line per step."""

    slots: int
    slot_s: float
    times: Sequence[float]
    seconds: float  # of each step
    deadline_s: float
    tell: Callable[[str], None]


def times_of(words: str) -> tuple[float, ...]:
    """Numbers separated by commas, in order. Raises ValueError naming what is none."""
    try:
        found = sorted({float(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each <= 100 for each in found):
        raise ValueError(f"{words}: must be numbers above 0, of 100 at the most, separated by commas")
    return tuple(found)


def run(plan: OverloadPlan) -> OverloadReport:
    """In a temporary directory that is gone afterwards. Raises InstallationFailed, PeerFailed."""
    load_before = load_1m()
    with scratch_directory() as scratch:
        keys = keys_for((TENANT,))
        behind = Behind(keys, plan.slots, plan.slot_s)
        with standing(scratch, behind, SETTINGS) as door, looping(scratch) as loop, watching(door.pid) as samples:
            before = samples[0].pss if samples else None
            steps, right = [], 0
            for times in plan.times:
                step = _step(plan, times, door, loop, keys[TENANT], samples)
                steps.append(step)
                right += step.good + step.late
            recorded = sum(record.outcome == "ok" for record in door.seen(sum(step.sent for step in steps)).records)
    unrecorded = right - recorded
    return OverloadReport(
        plan.slots,
        plan.slot_s,
        TOKENS,
        plan.deadline_s,
        tuple(steps),
        unrecorded,
        before,
        judge(steps, plan.slots / plan.slot_s * TOKENS, unrecorded),
        machine(),
        load_before,
        commit(),
        (cores_note(), *notes_of(steps)),
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
