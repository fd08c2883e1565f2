"""`kelvin bench burst`: send a thousand requests at once to a model at zero, of an installation as a user runs it.

No byte of the model is in memory or on NVMe. One start must answer all requests, and read each chunk once from the
store.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from coldstart_bench.harness.activator_testbed import (
    ONE_CORE_NOTE,
    OpenLoopClient,
    cores,
    running_open_loop,
    settings_for_requests,
)
from coldstart_bench.harness.arrivals import at_once
from coldstart_bench.harness.capacity_check import LEAST_BYTES
from coldstart_bench.harness.installation import Installation, running_installation
from coldstart_bench.harness.load_protocol import LoadResult, OpenLoopPlan, RequestTemplate, send_delays_s
from coldstart_bench.harness.process_stats import MIB, MemoryUse, memory_line, memory_use, sampling_process
from coldstart_bench.harness.program_runner import make_model
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_least, at_most, cell, ratio_or_none
from coldstart_bench.report.order_statistics import jain, quantile_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option

FAIR: Final = 0.95  # least Jain's index
# Largest share of pairs of a tenant's requests, not served at the same time, that may be answered in reverse order.
IN_ORDER: Final = 0.05
EACH_BYTES: Final = 128 << 10  # the most memory of the activator for a waiting request
OWNER, GUEST = "default", "guest"
MODEL: Final = "burst"
PROMPTS: Final = 4  # distinct prompts per tenant, with distinct answers
TOKENS: Final = 2
PATIENCE_S: Final = 600.0
CORES_NOTE: Final = "the activator is pinned to one core, the open loop to another one; runtimes have both"


class TenantAnswers(msgspec.Struct, frozen=True):
    """Results of one tenant, whose requests were all due at once in this order."""

    tenant: str
    asked: int
    right: int
    wrong: int  # answered with another text
    codes: dict[str, int]  # error codes of requests that were not answered
    first_s: float | None
    median_s: float | None
    last_s: float | None
    inversions: float | None  # share of its pairs that were answered in reverse order


class BurstFigures(Figures, frozen=True):
    """Figures of all tenants, in the order of their requests."""

    served: tuple[TenantAnswers, ...]
    fairness: float | None  # Jain's index of the tenants' shares of the first half of the answers
    lag_p99_s: float | None  # delay of the open loop itself
    memory: MemoryUse | None
    starts: int  # starts of the model
    chunk_reads: int  # from any tier
    chunks: int  # distinct chunks of the version


def inversions(ends: Sequence[float], apart: int) -> float | None:
    """Return the share of pairs, at least `apart` places apart, whose later request ended strictly earlier. `ends` are
    in the order of the requests. None without pairs. Requests that are served at the same time have no order.
    """
    found = [ends[later] < ends[earlier] for later in range(len(ends)) for earlier in range(later - apart + 1)]
    return sum(found) / len(found) if found else None


def fairness(answered: Sequence[tuple[float, str]], tenants: Sequence[str]) -> float | None:
    """Return Jain's index over the tenants' counts in the first half of the answers. All tenants sent equally many."""
    first = [tenant for _, tenant in sorted(answered)[: len(answered) // 2]]
    return jain([first.count(tenant) for tenant in tenants]) if first else None


def served(
    tenant: str, asked: int, ends_s: Sequence[float], wrong: int, codes: dict[str, int], slots: int
) -> TenantAnswers:
    """Return the results of a tenant. `ends_s` are of correct answers in request order; `slots` are served at once."""
    first, median, last = (quantile_of(ends_s, part) for part in (0.0, 0.5, 1.0))
    return TenantAnswers(tenant, asked, len(ends_s), wrong, codes, first, median, last, inversions(ends_s, slots))


def judge(figures: BurstFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. The state of each claim is the number of requests."""
    asked = sum(one.asked for one in figures.served)
    state = str(asked)
    wrong = asked - sum(one.right for one in figures.served)
    swapped = max((one.inversions for one in figures.served if one.inversions is not None), default=None)
    taken = None if figures.memory is None else figures.memory.grown / asked
    return (
        at_most("requests that were not answered right", wrong, 0, state),
        at_least("fairness between tenants, by Jain's index", figures.fairness, FAIR, state),
        at_most("pairs of a tenant that were answered the other way round", swapped, IN_ORDER, state),
        at_most("bytes of the activator's memory for each request", taken, EACH_BYTES, state),
        at_most("starts of the model, off one by", abs(figures.starts - 1), 0, state),
        # A hedged read may read a chunk twice. No read at all means that the chunks were not only in the store.
        at_most(
            "reads of a chunk", ratio_or_none(figures.chunk_reads or None, figures.chunks), 1, state, decides=False
        ),
    )


def table(figures: BurstFigures) -> str:
    """Return the figures as an aligned table."""
    rows: list[tuple[str, ...]] = [
        ("tenant", "asked", "right", "wrong", "first", "median", "last", "turned round", "not answered")
    ]
    for one in figures.served:
        times = (cell(each, "{:.2f}s") for each in (one.first_s, one.median_s, one.last_s))
        codes = ", ".join(f"{code} {count}" for code, count in sorted(one.codes.items())) or "none"
        counts = map(str, (one.asked, one.right, one.wrong))
        rows.append((one.tenant, *counts, *times, cell(one.inversions, "{:.2%}"), codes))
    fair = cell(figures.fairness, "{:.3f}")
    lines = [
        *align(rows),
        f"fairness between them over the first half of the answers (Jain): {fair}",
        f"{figures.starts} starts of the model, {figures.chunk_reads} reads of its {figures.chunks} chunks",
    ]
    if figures.memory is not None:
        each = figures.memory.grown / sum(one.asked for one in figures.served)
        lines.append(
            f"{memory_line(figures.memory)}; {each / 1024:.1f} KiB a request, "
            f"{figures.memory.grown / MIB:.1f} MiB in all"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BurstPlan(BenchPlan):
    """Options of `kelvin bench burst`: the number of requests of both tenants."""

    requests: int


def run(plan: BurstPlan, scratch: Path) -> BurstFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    settings = {**settings_for_requests(plan.requests + 1024), "KELVIN_CHUNK_BYTES": str(1 << 20)}
    plan.tell("making and pushing a model")
    make_model(scratch / "model", LEAST_BYTES // 2, 1, sharp=True)
    with running_installation(scratch / "data", settings=settings) as kelvin, running_open_loop(scratch) as loop:
        version = kelvin.push(scratch / "model", MODEL, replicas=1)
        payloads = _payloads(kelvin)
        right = loop.reference_texts(kelvin.port, payloads, PATIENCE_S)
        for tier in ("host", "nvme"):
            kelvin.empty_tier(tier)
        kelvin.wait_idle()
        before = kelvin.cache()
        ran, memory = _burst(plan, kelvin, loop, payloads)
        after = kelvin.cache()
        slots = _slots(kelvin)
        manifest = json.loads((kelvin.data / "store" / OWNER / "manifests" / version).read_bytes())
    ends = [(sent.took_s, payloads[sent.payload].who) for sent in ran.sent if sent.is_ok]
    return BurstFigures(
        tuple(_served(ran, payloads, right, tenant, slots) for tenant in (OWNER, GUEST)),
        fairness(ends, (OWNER, GUEST)),
        quantile_of(send_delays_s(ran.sent), 0.99),
        memory,
        starts=after["leases_granted"] - before["leases_granted"],  # each start takes one lease
        chunk_reads=sum(after["chunk_reads"].values()) - sum(before["chunk_reads"].values()),
        chunks=len({chunk["digest"] for chunk in manifest["chunks"]}),
        notes=(CORES_NOTE if cores()[0] != cores()[1] else ONE_CORE_NOTE,),
    )


def _slots(kelvin: Installation) -> int:
    versions = kelvin.model(MODEL)["versions"]
    return max((int(row["max_streams"]) for version in versions for row in version["replicas"]), default=1)


def _payloads(kelvin: Installation) -> tuple[RequestTemplate, ...]:
    """Return requests of the owner, and of a guest that may call its model."""
    kelvin.admin.request("POST", "/admin/v1/tenants", {"tenant": GUEST})
    made: Any = kelvin.admin.request("POST", f"/admin/v1/keys?tenant={GUEST}", {"name": "bench", "scopes": ["infer"]})
    kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/grants/{GUEST}?tenant={OWNER}")
    found = []
    for tenant, key, name in ((OWNER, kelvin.key, MODEL), (GUEST, made["secret"], f"{OWNER}/{MODEL}")):
        for number in range(PROMPTS):
            first = 10 * number + (5 if tenant == GUEST else 0)
            prompt = " ".join(f"w{first + place}" for place in range(4))
            body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            found.append(RequestTemplate(key, "/v1/completions", json.dumps(body), who=tenant))
    return tuple(found)


def _burst(
    plan: BurstPlan, kelvin: Installation, loop: OpenLoopClient, payloads: tuple[RequestTemplate, ...]
) -> tuple[LoadResult, MemoryUse | None]:
    """Send all requests of one tenant, then all of the other, at one moment: a queue in arrival order is unfair."""
    half = plan.requests // 2
    payload_numbers = [number % PROMPTS for number in range(plan.requests - half)]
    payload_numbers += [PROMPTS + number % PROMPTS for number in range(half)]
    arrivals = tuple(zip(at_once(plan.requests), payload_numbers, strict=True))
    pid = kelvin.pid_of("activator")
    pin_to_core(pid, cores()[0])
    plan.tell(f"sending {plan.requests} requests of two tenants at once")
    with sampling_process(pid) as samples:
        load_plan = OpenLoopPlan(kelvin.port, payloads, arrivals, plan.requests, plan.requests + 64, PATIENCE_S)
        ran = loop.run(load_plan)
    return ran, memory_use(samples)


def pin_to_core(pid: int, core: int) -> None:
    """Pin all threads of a process to one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def _served(
    ran: LoadResult, payloads: tuple[RequestTemplate, ...], right: list[str], tenant: str, slots: int
) -> TenantAnswers:
    sent = [each for each in ran.sent if payloads[each.payload].who == tenant]
    good = [each.took_s for each in sent if each.is_ok and ran.text(each) == right[each.payload]]
    wrong = sum(each.is_ok and ran.text(each) != right[each.payload] for each in sent)
    return served(tenant, len(sent), good, wrong, dict(Counter(each.code for each in sent if not each.is_ok)), slots)


BENCH: Final = Bench(
    "burst",
    """Send a thousand requests of two tenants at once to a model at zero. Report answers, their order, memory, and
    reads of chunks. Exits with 1 if a claim fails, except for the reads of a chunk.""",
    (option("--requests", 1000, click.IntRange(2, 10_000), "Requests at once, of both tenants."),),
    BurstPlan,
    run,
    table,
    judge,
)
