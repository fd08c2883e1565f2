"""`kelvin bench storm`: request many uncached models at once from several cache agents.

Each agent has its own directory, as if it were a node. All read one store with limited bandwidth: first each for
itself, then as peers of one another. The store counts what it sends to each agent. `kelvin bench burst` measures many
requests for one model.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from coldstart_bench.harness.capacity_check import find_shortage
from coldstart_bench.harness.installation import free_ports
from coldstart_bench.harness.program_runner import Program, program_output
from coldstart_bench.harness.service_runner import running_service
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, at_most
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.process.option_types import FiniteNumber
from kelvin.process.python_command import python_command

ONCE: Final = 1.01  # above 1, because a hedged read may read a range twice
ABOUT_ONCE: Final = 1.10
UNFAIR: Final = 0.20
TENANT: Final = "default"
CHUNK_BYTES: Final = 8 << 20
SLAB_BYTES: Final = 64 << 20
LINE_NOTE: Final = "all agents share one store on this machine, its bandwidth, and the CPU"


class NodeTraffic(msgspec.Struct, frozen=True):
    """Bytes of packs that the store sent to one agent, and how many of them for the first time."""

    sent_bytes: int
    distinct_bytes: int


class MissRound(msgspec.Struct, frozen=True):
    """One round of many uncached models at each agent, with the seconds until each lease, by agent."""

    models: int
    model_bytes: int
    line_bytes_s: float
    finished_s: tuple[tuple[float, ...], ...]
    failures: tuple[str, ...]
    nodes: tuple[NodeTraffic, ...]
    store: NodeTraffic  # traffic to all agents together


class StormFigures(Figures, frozen=True):
    """Figures of both rounds."""

    miss: MissRound  # each agent for itself
    peered: MissRound  # agents are peers of one another


def fair_finishes(sizes: Sequence[int], rate: float) -> tuple[float, ...]:
    """Return when each transfer would end if all unfinished ones shared the bandwidth equally (processor sharing)."""
    order, finishes, at, done = sorted(range(len(sizes)), key=sizes.__getitem__), [0.0] * len(sizes), 0.0, 0
    for place, number in enumerate(order):
        at += (sizes[number] - done) * (len(sizes) - place) / rate
        done = sizes[number]
        finishes[number] = at
    return tuple(finishes)


def unfairness(finished_s: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the largest relative distance from the fair finish. The rate is all bytes divided by the last finish."""
    rate = sum(sizes) / max(finished_s)
    fair = fair_finishes(sizes, rate)
    return max(abs(was - should) / should for was, should in zip(finished_s, fair, strict=True))


def judge(figures: StormFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. Only granted leases decide; the other claims mean nothing if nothing was read."""
    miss = figures.miss
    size = miss.model_bytes
    # A node that read nothing counts as the worst: its value is None, so the claim is not measured.
    worst = max((_times(node) for node in miss.nodes), key=lambda times: times or math.inf, default=None)
    in_all = _times(figures.peered.store)
    failed = len(miss.failures) + len(figures.peered.failures)
    fair = [unfairness(each, [size] * len(each)) for each in miss.finished_s if each and not miss.failures]
    return (
        at_most("leases that failed", failed, 0, "", size),
        at_most("times that a byte left the store, per node", worst, ONCE, "", size, decides=False),
        at_most("times that a byte left the store in all, with peers", in_all, ABOUT_ONCE, "", size, decides=False),
        at_most("largest distance from a fair finish", max(fair, default=None), UNFAIR, "", size, decides=False),
    )


def _times(node: NodeTraffic) -> float | None:
    """Return how often a byte left the store on average. None if none did."""
    return node.sent_bytes / node.distinct_bytes if node.sent_bytes and node.distinct_bytes else None


def table(figures: StormFigures) -> str:
    """Return the figures as text for people."""
    return "\n".join([*_lines(figures.miss, "each for itself"), *_lines(figures.peered, "peers of one another")])


def _lines(miss: MissRound, how: str) -> list[str]:
    lines = [
        f"{miss.models} models of {miss.model_bytes / 1e6:.0f} MB missing at once at {len(miss.nodes)} agents, {how}, "
        f"over a line of {miss.line_bytes_s / 1e6:.0f} MB/s: {miss.store.sent_bytes / 1e6:.1f} MB left the store, "
        f"{miss.store.distinct_bytes / 1e6:.1f} MB of them for the first time"
    ]
    for number, (node, ends) in enumerate(zip(miss.nodes, miss.finished_s, strict=True)):
        when = f"{min(ends):.2f} to {max(ends):.2f} s, median {median_of(ends).median:.2f} s" if ends else "never"
        again = node.sent_bytes - node.distinct_bytes
        lines.append(
            f"  agent {number}: leased after {when}; {node.sent_bytes / 1e6:.1f} MB left the store for it, "
            f"{again / 1e6:.2f} MB of them again"
        )
    return [*lines, *(f"  {failure}" for failure in miss.failures[:3])]


@dataclass(frozen=True, slots=True)
class StormPlan(BenchPlan):
    """Options of `kelvin bench storm`."""

    agents: int
    models: int
    model_bytes: int
    line_bytes_s: float


def disk_bytes(plan: StormPlan) -> int:
    """Return the bytes needed in $TMPDIR: the store, and an NVMe tier per agent."""
    return (plan.agents + 1) * plan.models * plan.model_bytes + (2 << 30)


def memory_bytes(plan: StormPlan) -> int:
    """Return the bytes of memory needed: a host tier per agent, and the store in the page cache."""
    return (plan.agents + 1) * (plan.models * plan.model_bytes + 3 * SLAB_BYTES) + (3 << 30)


def refusal(plan: StormPlan, free_disk: int, free_memory: int) -> str | None:
    """Return why disk or memory do not suffice, or None."""
    return find_shortage(disk_bytes(plan), memory_bytes(plan), free_disk, free_memory)


def run(plan: StormPlan, scratch: Path) -> StormFigures:
    """Run both rounds. Raises InstallationFailed, ProgramFailed."""
    versions = _publish(plan, scratch / "store")
    miss, peered = (_measure_miss(plan, scratch, versions, peered=each) for each in (False, True))
    return StormFigures(miss, peered, notes=(LINE_NOTE,))


def _publish(plan: StormPlan, store: Path) -> list[str]:
    plan.tell(f"making {plan.models} versions of {plan.model_bytes / 1e6:.0f} MB")
    sizes = map(str, (plan.models, plan.model_bytes, min(CHUNK_BYTES, plan.model_bytes), 1))
    found: list[str] = json.loads(program_output("coldstart_bench.programs.publish_versions", store, TENANT, *sizes))
    return found


def _measure_miss(plan: StormPlan, scratch: Path, versions: list[str], *, peered: bool) -> MissRound:
    """Measure a round with empty agents and a store whose counts are 0."""
    names = [f"{'peer' if peered else 'node'}{number}" for number in range(plan.agents)]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Program("throttled_store", str(scratch / "store"), str(plan.line_bytes_s)))
        url = f"s3://bench?endpoint=http://127.0.0.1:{store.call()['port']}"
        settings = _as_peers(scratch / "peers.key", names) if peered else {}
        runs = [
            stack.enter_context(_agent(scratch / name, plan, {"KELVIN_STORE": url, **settings.get(name, {})}))
            for name in names
        ]
        client = stack.enter_context(Program("lease_storm"))
        plan.tell(f"requesting all versions from {plan.agents} agents{' (peers)' if peered else ''} at once")
        ends: list[list[Any]] = client.call(runs=[str(run) for run in runs], tenant=TENANT, versions=versions)["ends"]
        counts = store.call()["counts"]
    for name in names:
        shutil.rmtree(scratch / name)
    return MissRound(
        models=plan.models,
        model_bytes=plan.model_bytes,
        line_bytes_s=plan.line_bytes_s,
        finished_s=tuple(
            tuple(end for node, _, end in ends if node == number and not isinstance(end, str))
            for number in range(plan.agents)
        ),
        failures=tuple(end for _, _, end in ends if isinstance(end, str)),
        nodes=tuple(NodeTraffic(*counts.get(name, (0, 0))) for name in names),
        store=NodeTraffic(*counts.get("all", (0, 0))),
    )


def _as_peers(key: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return settings by name for agents that serve one another."""
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    ports = free_ports(len(names))
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
    return {
        name: {
            "KELVIN_PEER_KEY": str(key),
            "KELVIN_PEER_LISTEN": address,
            "KELVIN_PEERS": ",".join(f"https://{other}" for other in addresses.values() if other != address),
        }
        for name, address in addresses.items()
    }


@contextlib.contextmanager
def _agent(data: Path, plan: StormPlan, settings: Mapping[str, str]) -> Iterator[Path]:
    """Run a cache agent on its own directory until the block ends. Yields its run directory."""
    slabs = -(-plan.models * plan.model_bytes // SLAB_BYTES) + 2
    data.mkdir()
    environment = {
        **os.environ,
        "KELVIN_DATA": str(data),
        **settings,
        "KELVIN_SLAB_BYTES": str(SLAB_BYTES),
        "KELVIN_HOST_BYTES": str(slabs * SLAB_BYTES),
        "AWS_ACCESS_KEY_ID": data.name,
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = python_command("weightcache")
    with running_service(command, environment, data / "log", (data / "run" / "cache.sock").exists, "a cache agent"):
        yield data / "run"


BENCH: Final = Bench(
    "storm",
    """Request many uncached models at once from several agents. Report the store's traffic, and the waits.""",
    (
        option("--agents", 8, click.IntRange(1, 64), "Number of agents."),
        option("--models", 30, click.IntRange(1, 200), "Uncached models at each agent."),
        option("--model-mib", 16, click.IntRange(1, 1024), "MiB per model.", "model_bytes", convert=lambda m: m << 20),
        option(
            "--line", 0.2, FiniteNumber(0.001, 100), "The store's GB/s.", "line_bytes_s", convert=lambda gb: gb * 1e9
        ),
    ),
    StormPlan,
    run,
    table,
    judge,
    refusal,
)
