"""`kelvin bench pool`: first token from zero by the start of a pod, as a Service of the version's own has it, and by a
bind of a pod that waits. Same version, same store, in turn within one run, real processes.

What both have alike is left out: the report of the first request, the decision, the way of an order to a cluster. So is
what a pod's start has alone: a scheduler, an image, a sandbox. So the true ratio is larger.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from coldstart_bench.certificates import make_inner
from coldstart_bench.environment import load_1m
from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.installation import InstallationFailed, running
from coldstart_bench.patience import comes
from coldstart_bench.pods import CLASS, ParkedPod, PodGround, first_token, own_pod, parked_pod
from coldstart_bench.processes import Rest, children, cpu_ticks
from coldstart_bench.programs import make_model
from coldstart_bench.report import Failed
from coldstart_bench.room import Need, shortage
from coldstart_bench.rows import OWN, WAITING, PoolFigures, judge_pool, rows_of, table
from contracts.jobs import Take
from contracts.roles import Role
from service.arguments import Number

NEED: Final = Need(disk_times=5.0, memory_times=4.0)
TENANT, MODEL = "default", "bench"
PARK_S: Final = 60.0
NOTE: Final = (
    "no cluster: neither has what its control plane takes, nor the start of a pod its scheduling, image and sandbox; "
    "both read the store through an empty cache of their own, the store's files may be in the page cache"
)


@dataclass(frozen=True, slots=True)
class PoolPlan(BenchPlan):
    """Options of `kelvin bench pool`."""

    size_bytes: int
    repeats: int
    seed: int = 1


def refusal(plan: PoolPlan, free_disk: int, free_memory: int) -> str | None:
    """Why there is no room for it."""
    return shortage(NEED.disk(plan.size_bytes), NEED.memory(plan.size_bytes), free_disk, free_memory)


def run(plan: PoolPlan, scratch: Path) -> PoolFigures:
    """Raises InstallationFailed, PeerFailed."""
    seconds: dict[str, list[float]] = {OWN: [], WAITING: []}
    ground, take = _prepared(plan, scratch)
    with parked_pod(ground, "parked") as parked:
        texts: set[str] = set()
        for turn in range(plan.repeats):
            plan.tell(f"round {turn + 1} of {plan.repeats}, load {load_1m():.2f}")
            for system in (OWN, WAITING) if turn % 2 == 0 else (WAITING, OWN):
                _rest(parked)
                took_s, text = _own(ground, take, turn) if system == OWN else _waiting(parked, take)
                seconds[system].append(took_s)
                texts.add(text)
    rows = rows_of({(plan.size_bytes, "store", system): each for system, each in seconds.items()})
    others = Failed(WAITING, f"other tokens than a pod of its own: {sorted(texts)}", plan.size_bytes)
    return PoolFigures(plan.size_bytes, rows, failures=() if len(texts) == 1 else (others,), notes=(NOTE,))


def _prepared(plan: PoolPlan, scratch: Path) -> tuple[PodGround, Take]:
    """A sealed version in a store, which nothing runs beside any more."""
    plan.tell("making and pushing a model")
    make_model(scratch / "model", plan.size_bytes, plan.seed)
    settings = {"KELVIN_HOST_BYTES": str(plan.size_bytes + plan.size_bytes // 8 + (1 << 29))}
    with running(scratch / "data", settings=settings) as kelvin:
        kelvin.push(scratch / "model", MODEL)
        (version,) = [each["version"] for each in kelvin.model(MODEL)["versions"]]
    make_inner(scratch / "inner", (Role.CONTROLPLANE, Role.RUNTIME))
    (scratch / "pods").mkdir()
    store = (scratch / "data" / "store").as_uri()
    take = Take(tenant=TENANT, model=MODEL, version=version, device_class=CLASS, store=store, weight_bytes=0)
    return PodGround(scratch / "pods", store, settings, scratch / "inner"), take


def _own(ground: PodGround, take: Take, turn: int) -> tuple[float, str]:
    """From the start of its process to its first token."""
    began_s = time.perf_counter()
    with own_pod(ground, take.version, f"own-{turn}") as port:
        came_s, text = first_token(port)
    return came_s - began_s, text


def _waiting(parked: ParkedPod, take: Take) -> tuple[float, str]:
    """From the order, its handshake included, to the first token; then it waits again."""
    began_s = time.perf_counter()
    parked.bind(take)
    came_s, text = first_token(parked.port)
    parked.release(take)
    return came_s - began_s, text


def _rest(parked: ParkedPod) -> None:
    """It waits, and has done what it does when it begins to: a start is measured from rest."""
    rest = Rest()
    # Not asked while it is looked at: it would answer.
    if not comes(parked.waits, PARK_S) or not comes(
        lambda: rest.sees(cpu_ticks(children(parked.pid)), time.monotonic()), PARK_S
    ):
        raise InstallationFailed(f"the pod is not at rest, {PARK_S:g} s after it was released")


BENCH: Final = Bench(
    "pool",
    """First token from zero by the start of a pod, and by a bind of one that waits.""",
    (
        option("--size", 0.1, Number(0.05, 100), "GB of the model.", "size_bytes", convert=lambda gb: int(gb * 1e9)),
        option("--repeats", 7, click.IntRange(1, 1000), "Rounds."),
    ),
    PoolPlan,
    run,
    lambda found: table(found.rows),
    judge_pool,
    refusal,
)
