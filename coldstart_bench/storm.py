"""`kelvin bench storm`: many requests for one model at zero, and many models missing at once at several agents.

The first is an installation as a user runs it. The second is agents alone, each with a directory of its own as if it
were a node, over one store behind a line of a given rate, first each for itself and then as peers of one another; the
store counts what it sends to whom.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.installation import Installation, free_port, running
from coldstart_bench.load import program_output
from coldstart_bench.peers import make_model
from coldstart_bench.programs import Program
from coldstart_bench.room import LEAST_BYTES, shortage
from coldstart_bench.services import service
from coldstart_bench.statistics import median_of
from coldstart_bench.storm_rows import Miss, Node, StormFigures, Waiters, judge, table
from service.arguments import Number

TENANT: Final = "default"
MODEL: Final = "storm"
PROMPT: Final = "w1 w2 w3 w4"
CHUNK_BYTES: Final = 8 << 20
SLAB_BYTES: Final = 64 << 20
READY_S: Final = 60.0
ANSWER_S: Final = 600.0
LINE_NOTE: Final = "one store for all agents, on this machine: its line is theirs together, and so is the processor"


@dataclass(frozen=True, slots=True)
class StormPlan(BenchPlan):
    """Options of `kelvin bench storm`."""

    waiters: int
    agents: int
    models: int
    model_bytes: int
    line_bytes_s: float


def disk_bytes(plan: StormPlan) -> int:
    """What it takes below $TMPDIR: the store, and an NVMe tier for each agent."""
    return (plan.agents + 1) * plan.models * plan.model_bytes + (2 << 30)


def memory_bytes(plan: StormPlan) -> int:
    """A host tier for each agent, and the store's files in the page cache."""
    return (plan.agents + 1) * (plan.models * plan.model_bytes + 3 * SLAB_BYTES) + (3 << 30)


def refusal(plan: StormPlan, free_disk: int, free_memory: int) -> str | None:
    """Why there is no room for it."""
    return shortage(disk_bytes(plan), memory_bytes(plan), free_disk, free_memory)


def run(plan: StormPlan, scratch: Path) -> StormFigures:
    """Raises InstallationFailed, PeerFailed."""
    waiters = _waiters(plan, scratch)
    versions = _publish(plan, scratch / "store")
    miss, peered = (_miss(plan, scratch, versions, peered=each) for each in (False, True))
    return StormFigures(waiters, miss, peered, notes=(LINE_NOTE,))


def _waiters(plan: StormPlan, scratch: Path) -> Waiters:
    plan.tell("making and pushing a model")
    make_model(scratch / "model", LEAST_BYTES, 1)
    places = str(max(2048, plan.waiters))
    settings = {"KELVIN_QUEUE_REQUESTS": places, "KELVIN_QUEUE_REQUESTS_PER_TENANT": places}
    settings |= {"KELVIN_CHUNK_BYTES": str(1 << 20)}
    with running(scratch / "data", settings=settings) as kelvin:
        version = kelvin.push(scratch / "model", MODEL)
        kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/scale", {"max": 1})
        right = _text(kelvin)
        for tier in ("host", "nvme"):
            kelvin.forget(tier)
        before = kelvin.admin.request("GET", "/admin/v1/cache")
        plan.tell(f"{plan.waiters} ask at once")
        answers = asyncio.run(_all_at_once(kelvin, plan.waiters))
        after = kelvin.admin.request("GET", "/admin/v1/cache")
        manifest = json.loads((kelvin.data / "store" / TENANT / "manifests" / version).read_bytes())
        seconds = [seconds for seconds, _ in answers if seconds is not None]
        return Waiters(
            asked=plan.waiters,
            answered=len(seconds),
            wrong=sum(text != right for seconds, text in answers if seconds is not None),
            leases=after["leases_granted"] - before["leases_granted"],
            chunk_reads=sum(after["chunk_reads"].values()) - sum(before["chunk_reads"].values()),
            chunks=len({chunk["digest"] for chunk in manifest["chunks"]}),
            first_s=min(seconds, default=0.0),
            median_s=median_of(seconds).median if seconds else 0.0,
            last_s=max(seconds, default=0.0),
        )


def _text(kelvin: Installation) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    return str(kelvin.door.request("POST", "/v1/completions", body)["choices"][0]["text"])


async def _all_at_once(kelvin: Installation, count: int) -> list[tuple[float | None, str]]:
    """Of each request seconds to the whole answer and its text, or None and what was said instead."""
    context = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    key = (kelvin.data / "default.key").read_text().strip()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    url, began = f"https://localhost:{kelvin.port}/v1/completions", time.perf_counter()

    async def one(session: aiohttp.ClientSession) -> tuple[float | None, str]:
        try:
            async with session.post(url, json=body, ssl=context) as answer:
                if answer.status != 200:
                    return None, await answer.text()
                text = str((await answer.json())["choices"][0]["text"])
                return time.perf_counter() - began, text
        except (aiohttp.ClientError, TimeoutError) as error:
            return None, repr(error)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        headers={"authorization": f"Bearer {key}"},
    ) as session:
        return await asyncio.gather(*(one(session) for _ in range(count)))


def _publish(plan: StormPlan, store: Path) -> list[str]:
    """The versions that will be missing."""
    plan.tell(f"making {plan.models} versions of {plan.model_bytes / 1e6:.0f} MB")
    sizes = map(str, (plan.models, plan.model_bytes, min(CHUNK_BYTES, plan.model_bytes), 1))
    found: list[str] = json.loads(program_output("coldstart_bench.loaders.publish", store, TENANT, *sizes))
    return found


def _miss(plan: StormPlan, scratch: Path, versions: list[str], *, peered: bool) -> Miss:
    """Agents that have nothing, and a store that has counted nothing yet."""
    names = [f"{'peer' if peered else 'node'}{number}" for number in range(plan.agents)]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Program("throttled_store", str(scratch / "store"), str(plan.line_bytes_s)))
        url = f"s3://bench?endpoint=http://127.0.0.1:{store.ask()['port']}"
        settings = _as_peers(scratch / "peers.key", names) if peered else {}
        runs = [
            stack.enter_context(_agent(scratch / name, plan, {"KELVIN_STORE": url, **settings.get(name, {})}))
            for name in names
        ]
        client = stack.enter_context(Program("leases"))
        plan.tell(f"{plan.agents} agents{', peers,' if peered else ''} are asked for all of them at once")
        ends: list[list[Any]] = client.ask(runs=[str(run) for run in runs], tenant=TENANT, versions=versions)["ends"]
        counts = store.ask()["counts"]
    for name in names:
        shutil.rmtree(scratch / name)
    return Miss(
        models=plan.models,
        model_bytes=plan.model_bytes,
        line_bytes_s=plan.line_bytes_s,
        finished_s=tuple(
            tuple(end for node, _, end in ends if node == number and not isinstance(end, str))
            for number in range(plan.agents)
        ),
        failures=tuple(end for _, _, end in ends if isinstance(end, str)),
        nodes=tuple(Node(*counts.get(name, (0, 0))) for name in names),
        store=Node(*counts.get("all", (0, 0))),
    )


def _as_peers(key: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Settings of each, of agents that serve one another."""
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
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
    """A cache agent over a directory of its own, until the block ends; its run directory."""
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
    command = [sys.executable, "-m", "weightcache"]
    with service(command, environment, data / "log", (data / "run" / "cache.sock").exists, "a cache agent"):
        yield data / "run"


BENCH: Final = Bench(
    "storm",
    """Many requests for a model at zero; many models missing at once: what leaves the store, and who waits how
    long.""",
    (
        option("--waiters", 1000, click.IntRange(1, 10_000), "For one model."),
        option("--agents", 8, click.IntRange(1, 64), "Each as if it were a node."),
        option("--models", 30, click.IntRange(1, 200), "Missing at once, at each."),
        option("--model-mib", 16, click.IntRange(1, 1024), "Of each.", "model_bytes", convert=lambda mib: mib << 20),
        option("--line", 0.2, Number(0.001, 100), "GB/s, of the store.", "line_bytes_s", convert=lambda gb: gb * 1e9),
    ),
    StormPlan,
    run,
    table,
    judge,
    refusal,
)
