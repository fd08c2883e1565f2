"""`kelvin bench burst`: a thousand requests at once for a model at zero, of an installation as a user runs it."""

import contextlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.installation import Installation, running
from coldstart_bench.peers import make_model
from coldstart_bench.room import LEAST_BYTES
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.arrivals import at_once
from coldstart_bench.traffic.behind import Loop, cores, looping
from coldstart_bench.traffic.burst_rows import BurstFigures, Served, fairness, judge, served, table
from coldstart_bench.traffic.exchange import Payload, Plan, Ran, lags_s
from coldstart_bench.traffic.family import pid_of
from coldstart_bench.traffic.memory import Memory, memory_of, watching

OWNER, GUEST = "default", "guest"
MODEL: Final = "burst"
PROMPTS: Final = 4  # of each tenant, each with an answer of its own
TOKENS: Final = 2
PATIENCE_S: Final = 600.0
CORES_NOTE: Final = "the activator is held to one core, the open loop to another one; runtimes have both"


@dataclass(frozen=True, slots=True)
class BurstPlan(BenchPlan):
    """How many to send, of two tenants."""

    requests: int


def run(plan: BurstPlan, scratch: Path) -> BurstFigures:
    """Raises InstallationFailed, PeerFailed."""
    places = str(plan.requests + 1024)
    settings = {f"KELVIN_QUEUE_REQUESTS{whose}": places for whose in ("", "_PER_TENANT", "_IN_ALL")}
    settings |= {"KELVIN_HEAD_S": "60", "KELVIN_CONNECTIONS": places, "KELVIN_REQUESTS": places}
    settings |= {"KELVIN_CHUNK_BYTES": str(1 << 20)}
    plan.tell("making and pushing a model")
    make_model(scratch / "model", LEAST_BYTES // 2, 1, sharp=True)
    with running(scratch / "data", settings=settings) as kelvin, looping(scratch) as loop:
        kelvin.push(scratch / "model", MODEL)
        kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/scale", {"max": 1})
        payloads = _payloads(kelvin)
        right = _right(loop, kelvin.port, payloads)
        kelvin.to_zero(MODEL)
        kelvin.rest()
        before = leases(kelvin)
        ran, memory = _burst(plan, kelvin, loop, payloads)
        starts = leases(kelvin) - before
        slots = _slots(kelvin)
    ends = [(sent.took_s, payloads[sent.payload].who) for sent in ran.sent if sent.is_ok]
    return BurstFigures(
        tuple(_served(ran, payloads, right, tenant, slots) for tenant in (OWNER, GUEST)),
        fairness(ends, (OWNER, GUEST)),
        quantile_of(lags_s(ran.sent), 0.99),
        memory,
        starts,
        notes=(CORES_NOTE,),
    )


def leases(kelvin: Installation) -> int:
    """That its cache agent has granted: one for each start."""
    return int(kelvin.admin.request("GET", "/admin/v1/cache")["leases_granted"])


def _slots(kelvin: Installation) -> int:
    """Of the model's only replica."""
    versions = kelvin.model(MODEL)["versions"]
    return max((int(row["max_streams"]) for version in versions for row in version["replicas"]), default=1)


def _payloads(kelvin: Installation) -> tuple[Payload, ...]:
    """Of the owner, and of a guest that may call its model."""
    kelvin.admin.request("POST", "/admin/v1/tenants", {"tenant": GUEST})
    made: Any = kelvin.admin.request("POST", f"/admin/v1/keys?tenant={GUEST}", {"name": "bench", "scopes": ["infer"]})
    kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/grants/{GUEST}?tenant={OWNER}")
    own = (kelvin.data / "default.key").read_text().strip()
    found = []
    for tenant, key, name in ((OWNER, own, MODEL), (GUEST, made["secret"], f"{OWNER}/{MODEL}")):
        for number in range(PROMPTS):
            first = 10 * number + (5 if tenant == GUEST else 0)
            prompt = " ".join(f"w{first + place}" for place in range(4))
            body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            found.append(Payload(key, "/v1/completions", json.dumps(body), who=tenant))
    return tuple(found)


def _right(loop: Loop, port: int, payloads: tuple[Payload, ...]) -> list[str]:
    """What each is answered by itself: one after another, on one connection."""
    arrivals = tuple((0, number) for number in range(len(payloads)))
    ran = loop.run(Plan(port, payloads, arrivals, 0, 1, PATIENCE_S))
    return [ran.text(sent) if sent.is_ok else f"not answered: {sent.code}" for sent in ran.sent]


def _burst(
    plan: BurstPlan, kelvin: Installation, loop: Loop, payloads: tuple[Payload, ...]
) -> tuple[Ran, Memory | None]:
    """All of one tenant's before all of the other's, at one moment: who served in turn would serve one tenant first."""
    half = plan.requests // 2
    whose = [number % PROMPTS for number in range(plan.requests - half)]
    whose += [PROMPTS + number % PROMPTS for number in range(half)]
    arrivals = tuple(zip(at_once(plan.requests), whose, strict=True))
    pid = pid_of(kelvin.pid, "activator")
    hold(pid, cores()[0])
    plan.tell(f"{plan.requests} ask at once, of two tenants")
    with watching(pid) as samples:
        asked = Plan(kelvin.port, payloads, arrivals, plan.requests, plan.requests + 64, PATIENCE_S)
        ran = loop.run(asked)
    return ran, memory_of(samples)


def hold(pid: int, core: int) -> None:
    """All threads of a process on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def _served(ran: Ran, payloads: tuple[Payload, ...], right: list[str], tenant: str, slots: int) -> Served:
    sent = [each for each in ran.sent if payloads[each.payload].who == tenant]
    good = [each.took_s for each in sent if each.is_ok and ran.text(each) == right[each.payload]]
    wrong = sum(each.is_ok and ran.text(each) != right[each.payload] for each in sent)
    return served(tenant, len(sent), good, wrong, dict(Counter(each.code for each in sent if not each.is_ok)), slots)


BENCH: Final = Bench(
    "burst",
    """A thousand requests of two tenants at once for a model at zero, of an installation: answers, their order, and
    memory. Exit 1 where a line does not hold.""",
    (option("--requests", 1000, click.IntRange(2, 10_000), "At once, in all."),),
    BurstPlan,
    run,
    table,
    judge,
)
