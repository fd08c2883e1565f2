"""`kelvin bench flood`: one tenant sends a thousand requests at once. How long does a quiet tenant wait?"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from coldstart_bench.harness.activator_testbed import (
    MODEL,
    UpstreamConfig,
    cores_note,
    keys_for,
    one_model,
    running_activator,
    running_open_loop,
    settings_for_requests,
)
from coldstart_bench.harness.arrivals import at_once, constant
from coldstart_bench.harness.load_protocol import LoadResult, OpenLoopPlan, RequestTemplate, send_delays_s
from coldstart_bench.harness.process_stats import MemoryUse, memory_line, memory_use, sampling_process
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_least, at_most, cell, recorded_once
from coldstart_bench.report.order_statistics import quantile_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.process.option_types import FiniteNumber

TIMES: Final = 1.0  # service times that the quiet tenant may wait
BUSY: Final = 0.90  # least utilisation of the slots under overload
LOUD, QUIET = "loud", "quiet"
APART: Final = 1.37  # service times between quiet requests: not a whole number, so that they arrive at any phase
FROM_S: Final = 0.05  # by then, the flood has arrived
TOKENS: Final = 16
PATIENCE_S: Final = 120.0


class QueueWaits(msgspec.Struct, frozen=True):
    """Waits of one tenant in seconds: in the queue, as recorded, and as its client saw them from when each was due."""

    tenant: str
    asked: int
    right: int
    queued_p50_s: float | None
    queued_p95_s: float | None
    queued_max_s: float | None
    client_p95_s: float | None  # latency minus one service time


class FloodFigures(Figures, frozen=True):
    """Figures of both tenants and of the replica."""

    slots: int
    slot_s: float
    loud: QueueWaits
    quiet: QueueWaits
    seconds: float  # until the last answer
    most_inside: int  # most requests at the replica at once
    unrecorded: int  # answers minus usage records; negative if there are more records
    lag_p99_s: float | None  # delay of the open loop itself
    memory: MemoryUse | None


def queue_waits(
    tenant: str, asked: int, right: int, queued_s: Sequence[float], beyond_s: Sequence[float]
) -> QueueWaits:
    """Return a tenant's waits, from the usage records and from its client."""
    return QueueWaits(
        tenant,
        asked,
        right,
        quantile_of(queued_s, 0.5),
        quantile_of(queued_s, 0.95),
        quantile_of(queued_s, 1.0),
        quantile_of(beyond_s, 0.95),
    )


def judge(figures: FloodFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. The state of each claim is the number of slots."""
    state, slots, quiet = str(figures.slots), figures.slots, figures.quiet
    right = figures.loud.right + quiet.right
    waited = None if quiet.queued_p95_s is None else quiet.queued_p95_s / figures.slot_s
    busy = right * figures.slot_s / slots / figures.seconds if figures.seconds else None
    return (
        at_most("the quiet tenant's wait in the queue, p95, to one service time", waited, TIMES, state),
        at_most("requests that were not answered right", figures.loud.asked + quiet.asked - right, 0, state),
        *recorded_once(figures.unrecorded, state),
        at_most("requests at the replica beyond its slots", figures.most_inside - slots, 0, state),
        at_least("share of the slots' time that was used", busy, BUSY, state),
    )


def table(figures: FloodFigures) -> str:
    """Return the figures as an aligned table."""
    rows: list[tuple[str, ...]] = [("tenant", "asked", "right", "queued p50", "p95", "most", "client p95")]
    for waits in (figures.loud, figures.quiet):
        seen = (waits.queued_p50_s, waits.queued_p95_s, waits.queued_max_s, waits.client_p95_s)
        cells = (cell(each, "{:.1f}ms", times=1e3) for each in seen)
        rows.append((waits.tenant, str(waits.asked), str(waits.right), *cells))
    head = f"{figures.slots} slots of {figures.slot_s * 1e3:g} ms; all answered after {figures.seconds:.2f} s"
    lag = cell(figures.lag_p99_s, "{:.1f} ms", times=1e3)
    return "\n".join(
        [head, *align(rows), f"the open loop sent within {lag} of when it was due (p99)", memory_line(figures.memory)]
    )


@dataclass(frozen=True, slots=True)
class FloodPlan(BenchPlan):
    """Options of `kelvin bench flood`."""

    requests: int
    slots: int
    slot_s: float


def run(plan: FloodPlan, scratch: Path) -> FloodFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    keys = keys_for((LOUD, QUIET))
    lasts_s = plan.requests * plan.slot_s / plan.slots
    quiet = [int(FROM_S * 1e6) + at for at in constant(1 / (APART * plan.slot_s), lasts_s)]
    arrivals = sorted([*((at, 0) for at in at_once(plan.requests)), *((at, 1) for at in quiet)])
    with (
        running_activator(
            scratch,
            UpstreamConfig(one_model(keys, plan.slots), plan.slot_s),
            settings_for_requests(2 * plan.requests + 1024),
        ) as door,
        running_open_loop(scratch) as loop,
    ):
        plan.tell(f"{plan.requests} of one tenant at once, {len(quiet)} of another one, for {lasts_s:.1f} s")
        load_plan = OpenLoopPlan(
            port=door.port,
            payloads=tuple(payload(tenant, key) for tenant, key in keys.items()),
            arrivals=tuple(arrivals),
            connections=plan.requests + 16,
            most=plan.requests + 256,
            patience_s=PATIENCE_S,
        )
        with sampling_process(door.pid) as samples:
            ran = loop.run(load_plan)
        seen = door.upstream_report(len(arrivals))
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
        quantile_of(send_delays_s(ran.sent), 0.99),
        memory_use(samples),
        notes=(cores_note(),),
    )


def payload(tenant: str, key: str) -> RequestTemplate:
    """Return a completion request of this tenant for the owner's model."""
    name = MODEL if tenant == LOUD else f"{LOUD}/{MODEL}"
    body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": TOKENS}
    return RequestTemplate(key, "/v1/completions", json.dumps(body), who=tenant)


def _waits(ran: LoadResult, recorded: list[RequestRecord], number: int, tenant: str, slot_s: float) -> QueueWaits:
    sent = [each for each in ran.sent if each.payload == number]
    right = [each for each in sent if each.is_ok and ran.text(each) == f"3 {TOKENS}"]
    queued_s = [record.queued_us / 1e6 for record in recorded if record.tenant == tenant]
    return queue_waits(tenant, len(sent), len(right), queued_s, [each.took_s - slot_s for each in right])


BENCH: Final = Bench(
    "flood",
    """Measure how long a quiet tenant waits while another one sends a thousand requests at once. Exits with 1 if a
    claim fails.""",
    (
        option("--requests", 1000, click.IntRange(1, 10_000), "Requests of the loud tenant, at once."),
        option("--slots", 16, click.IntRange(1, 1024), "Slots of the replica."),
        option("--slot-ms", 200.0, FiniteNumber(1, 60_000), "Time per request.", "slot_s", convert=lambda ms: ms / 1e3),
    ),
    FloodPlan,
    run,
    table,
    judge,
)
