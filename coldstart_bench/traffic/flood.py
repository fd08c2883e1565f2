"""`kelvin bench flood`: one tenant asks a thousand times at once, another one now and then: how long does it wait?"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.arrivals import at_once, constant
from coldstart_bench.traffic.behind import MODEL, Behind, cores_note, keys_for, looping, standing
from coldstart_bench.traffic.exchange import Payload, Plan, Ran, lags_s
from coldstart_bench.traffic.flood_rows import FloodFigures, Waits, judge, table, waits_of
from coldstart_bench.traffic.memory import memory_of, watching
from contracts.usage import RequestRecord
from service.arguments import Number

LOUD, QUIET = "loud", "quiet"
APART: Final = 1.37  # service times between the quiet one's requests, so that they meet the slots at any moment
FROM_S: Final = 0.05  # the flood is there by then
TOKENS: Final = 16
PATIENCE_S: Final = 120.0
HEAD_S: Final = "60"  # connections that are open before the beginning say nothing for a while


@dataclass(frozen=True, slots=True)
class FloodPlan(BenchPlan):
    """Options of `kelvin bench flood`."""

    requests: int
    slots: int
    slot_s: float


def run(plan: FloodPlan, scratch: Path) -> FloodFigures:
    """Raises InstallationFailed, PeerFailed."""
    keys = keys_for((LOUD, QUIET))
    places = str(2 * plan.requests + 1024)
    settings = {f"KELVIN_QUEUE_REQUESTS{whose}": places for whose in ("", "_PER_TENANT", "_IN_ALL")}
    settings |= {"KELVIN_HEAD_S": HEAD_S, "KELVIN_CONNECTIONS": places, "KELVIN_REQUESTS": places}
    lasts_s = plan.requests * plan.slot_s / plan.slots
    quiet = [int(FROM_S * 1e6) + at for at in constant(1 / (APART * plan.slot_s), lasts_s)]
    arrivals = sorted([*((at, 0) for at in at_once(plan.requests)), *((at, 1) for at in quiet)])
    with standing(scratch, Behind(keys, plan.slots, plan.slot_s), settings) as door, looping(scratch) as loop:
        plan.tell(f"{plan.requests} of one tenant at once, {len(quiet)} of another one, for {lasts_s:.1f} s")
        asked = Plan(
            port=door.port,
            payloads=tuple(payload(tenant, key) for tenant, key in keys.items()),
            arrivals=tuple(arrivals),
            connections=plan.requests + 16,
            most=plan.requests + 256,
            patience_s=PATIENCE_S,
        )
        with watching(door.pid) as samples:
            ran = loop.run(asked)
        seen = door.seen(len(arrivals))
    recorded = [record for record in seen.records if record.outcome == "ok"]
    loud, other = (_waits(ran, recorded, number, tenant, plan.slot_s) for number, tenant in enumerate(keys))
    seconds = max((sent.end_us for sent in ran.sent), default=0) / 1e6
    return FloodFigures(
        plan.slots,
        plan.slot_s,
        loud,
        other,
        seconds,
        seen.most_inside,
        loud.right + other.right - len(recorded),
        quantile_of(lags_s(ran.sent), 0.99),
        memory_of(samples),
        notes=(cores_note(),),
    )


def payload(tenant: str, key: str) -> Payload:
    """A completion, at the owner's model, as that tenant calls it."""
    name = MODEL if tenant == LOUD else f"{LOUD}/{MODEL}"
    body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": TOKENS}
    return Payload(key, "/v1/completions", json.dumps(body), who=tenant)


def _waits(ran: Ran, recorded: list[RequestRecord], number: int, tenant: str, slot_s: float) -> Waits:
    sent = [each for each in ran.sent if each.payload == number]
    right = [each for each in sent if each.is_ok and ran.text(each) == f"3 {TOKENS}"]
    queued_s = [record.queued_us / 1e6 for record in recorded if record.tenant == tenant]
    return waits_of(tenant, len(sent), len(right), queued_s, [each.took_s - slot_s for each in right])


BENCH: Final = Bench(
    "flood",
    """One tenant asks a thousand times at once, another one now and then: how long that one waits. Exit 1 where a line
    does not hold.""",
    (
        option("--requests", 1000, click.IntRange(1, 10_000), "At once, of one."),
        option("--slots", 16, click.IntRange(1, 1024), "Of the replica."),
        option("--slot-ms", 200.0, Number(1, 60_000), "Of each request.", "slot_s", convert=lambda ms: ms / 1e3),
    ),
    FloodPlan,
    run,
    table,
    judge,
)
