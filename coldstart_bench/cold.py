"""`kelvin bench cold`: first token from zero, over kept-alive TLS, beside the floor and what a user would pick instead.

All systems of a size are measured in turn within one round, so that a noisy neighbour hits all of them. Beside that, of
each size: our start from the store; where a start's time goes, by its timeline; what the known answers cost, by the
engine's first step with them and without; and how much memory a start takes.
"""

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coldstart_bench import footprint
from coldstart_bench.cold_verdicts import judge
from coldstart_bench.environment import commit, drop_page_cache, load_1m, machine, warm_page_cache
from coldstart_bench.installation import Installation, InstallationFailed, running
from coldstart_bench.peers import Peer, make_model, start_fresh
from coldstart_bench.programs import Program
from coldstart_bench.room import Need
from coldstart_bench.rows import FLOOR, KELVIN, Footprint, Report, StageKey, rows_of, stages_of, without_probe
from coldstart_bench.statistics import median_of

PROMPT_TOKENS: Final = 16
PROMPT_IDS: Final = tuple(range(7, 7 + PROMPT_TOKENS))
PROMPT: Final = " ".join(f"w{token - 2}" for token in PROMPT_IDS)  # the tokenizer of make_model: w<n> is token n + 2
FRESH, RESIDENT = "from_pretrained", "resident transformers"
TENANT: Final = "default"
NEED: Final = Need(disk_times=4.0, memory_times=4.0)
PROBE_NOTE: Final = (
    "kelvin without its probe: less what known answers add to the engine's first step, both ways in turn; no setting "
    "leaves them out of what is served"
)
HYPERVISOR_NOTE: Final = (
    "nvme and store rows: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may "
    "still be warm"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `tell` hears one line per step."""

    sizes_bytes: Sequence[int]
    repeats: int
    tell: Callable[[str], None]
    seed: int = 1


@dataclass(slots=True)
class _Seen:
    """Seconds by size, tier and system; of our starts also each stage's own seconds; first steps by size and probe."""

    seconds: dict[tuple[int, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[StageKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[tuple[int, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    footprints: list[Footprint] = field(default_factory=list)


def run(plan: Plan) -> Report:
    """Measure everything in a temporary directory that is gone afterwards."""
    seen, load_before = _Seen(), load_1m()
    for size_bytes in plan.sizes_bytes:
        scratch = Path(tempfile.mkdtemp(prefix="kelvin-bench-"))
        try:
            settings = {"KELVIN_HOST_BYTES": str(size_bytes + size_bytes // 8 + (1 << 30))}
            with running(scratch / "data", settings=settings) as kelvin:
                _measure_size(plan, kelvin, scratch / "model", size_bytes, seen)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    shares = {size: _probe_share(seen, size) for size in plan.sizes_bytes}
    rows, stages = without_probe(rows_of(seen.seconds), shares), stages_of(seen.stages)
    footprints = tuple(seen.footprints)
    return Report(
        rows,
        machine(),
        commit(),
        (HYPERVISOR_NOTE, PROBE_NOTE),
        stages=stages,
        footprints=footprints,
        verdicts=judge(rows, stages, footprints),
        load_before=load_before,
    )


def _probe_share(seen: _Seen, size_bytes: int) -> float:
    """Seconds by which a first step with known answers is longer than one without."""
    return median_of(seen.steps[size_bytes, True]).median - median_of(seen.steps[size_bytes, False]).median


def _measure_size(plan: Plan, kelvin: Installation, directory: Path, size_bytes: int, seen: _Seen) -> None:
    name = f"bench-{size_bytes // 1_000_000}mb"
    plan.tell(f"making and pushing {name}")
    make_model(directory, size_bytes, plan.seed)
    weights = [directory / "model.safetensors"]
    version = kelvin.push(directory, name)
    kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    kelvin.door.first_token(name, PROMPT)  # the host tier holds it from here on, and the NVMe tier before long
    kelvin.forget("host")
    kept = _chunks_on_nvme(kelvin)
    seen.footprints.append(_footprint(kelvin, name, weights[0].stat().st_size))
    measured = seen.seconds
    with contextlib.ExitStack() as peers:
        host_floor = peers.enter_context(Peer("floor.py", str(directory), "host"))
        nvme_floor = peers.enter_context(Peer("floor.py", str(directory), "nvme"))
        resident = peers.enter_context(Peer("resident.py", str(directory)))
        engine = peers.enter_context(Program("first_step", str(kelvin.data / "run")))
        for turn in range(plan.repeats):
            plan.tell(f"{name}: round {turn + 1} of {plan.repeats}")
            warm_page_cache(weights)
            kelvin.to_zero(name)
            measured[size_bytes, "host", KELVIN].append(_start(kelvin, name, size_bytes, "host", seen))
            measured[size_bytes, "host", FLOOR].append(host_floor.start(PROMPT_IDS)[0])
            measured[size_bytes, "host", RESIDENT].append(resident.start(PROMPT_IDS)[0])
            measured[size_bytes, "host", FRESH].append(start_fresh(directory, PROMPT_IDS)[0])
            kelvin.to_zero(name)
            for probe in (True, False):
                step = engine.ask(tenant=TENANT, version=version, ids=list(PROMPT_IDS), probe=probe)
                seen.steps[size_bytes, probe].append(step["seconds"])
            kelvin.forget("host")
            drop_page_cache(kelvin.nvme_files())
            measured[size_bytes, "nvme", KELVIN].append(_start(kelvin, name, size_bytes, "nvme", seen))
            drop_page_cache(weights)
            measured[size_bytes, "nvme", FLOOR].append(nvme_floor.start(PROMPT_IDS)[0])
            drop_page_cache(weights)
            measured[size_bytes, "nvme", RESIDENT].append(resident.start(PROMPT_IDS)[0])
            drop_page_cache(weights)
            measured[size_bytes, "nvme", FRESH].append(start_fresh(directory, PROMPT_IDS)[0])
            for tier in ("host", "nvme"):
                kelvin.forget(tier)
            drop_page_cache(kelvin.store_files())
            measured[size_bytes, "store", KELVIN].append(_start(kelvin, name, size_bytes, "store", seen))
            drop_page_cache(weights)
            measured[size_bytes, "store", FLOOR].append(nvme_floor.start(PROMPT_IDS)[0])
            kelvin.wait(lambda: _chunks_on_nvme(kelvin) == kept, "the NVMe tier holds the version again")
    kelvin.to_zero(name)


def _start(kelvin: Installation, name: str, size_bytes: int, tier: str, seen: _Seen) -> float:
    """Seconds to the first token. Its timeline is asked for afterwards, and from where its bytes came."""
    before = _bytes_read(kelvin)
    seconds, request_id = kelvin.door.start(name, PROMPT)
    read = {source for source, total in _bytes_read(kelvin).items() if total > before.get(source, 0)}
    if read != {tier} - {"host"}:
        raise InstallationFailed(f"{name}: bytes came from {sorted(read)} where '{tier}' is measured")
    before_us = 0
    for stamp in kelvin.door.request("GET", f"/v1/requests/{request_id}/timeline")["stamps"]:
        seen.stages[size_bytes, tier, stamp["stage"]].append((stamp["at_us"] - before_us) / 1e6)
        before_us = stamp["at_us"]
    return seconds


def _bytes_read(kelvin: Installation) -> dict[str, int]:
    """By tier, since the agent started."""
    found: dict[str, int] = kelvin.admin.request("GET", "/admin/v1/cache")["bytes_read"]
    return found


def _chunks_on_nvme(kelvin: Installation) -> int:
    return int(kelvin.admin.request("GET", "/admin/v1/cache")["nvme"]["chunks"])


def _footprint(kelvin: Installation, name: str, model_bytes: int) -> Footprint:
    """Of one start from NVMe that is not timed."""
    kelvin.forget("host")
    with footprint.watching(kelvin.pid) as watch:
        kelvin.door.first_token(name, PROMPT)
        (pid,) = [replica["pid"] for version in kelvin.model(name)["versions"] for replica in version["replicas"]]
    if pid not in watch.before:
        raise InstallationFailed(f"{name}: process {pid} was no parked standby")
    host = kelvin.admin.request("GET", "/admin/v1/cache")["host"]
    slabs_bytes = host["slabs_used"] * host["slab_bytes"]
    return Footprint(model_bytes, slabs_bytes, watch.before[pid], watch.peak[pid])
