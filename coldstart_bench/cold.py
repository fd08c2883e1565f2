"""`kelvin bench cold`: first token from zero, over kept-alive TLS, beside the floor and what a user would pick instead.

All systems of a size are measured in turn within one round, so that a noisy neighbour hits all of them.
"""

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstart_bench.environment import commit, drop_page_cache, machine, warm_page_cache
from coldstart_bench.installation import Installation, running
from coldstart_bench.peers import Peer, make_model, start_fresh
from coldstart_bench.rows import FLOOR, Report, rows_of

PROMPT_TOKENS: Final = 16
PROMPT_IDS: Final = tuple(range(7, 7 + PROMPT_TOKENS))
PROMPT: Final = " ".join(f"w{token - 2}" for token in PROMPT_IDS)  # the tokenizer of make_model: w<n> is token n + 2
KELVIN, FRESH, RESIDENT = "kelvin", "from_pretrained", "resident transformers"
HYPERVISOR_NOTE: Final = (
    "nvme rows: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may still be warm"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `tell` hears one line per step."""

    sizes_bytes: Sequence[int]
    repeats: int
    tell: Callable[[str], None]
    seed: int = 1


def run(plan: Plan) -> Report:
    """Measure everything in a temporary directory that is gone afterwards."""
    measured: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    scratch = Path(tempfile.mkdtemp(prefix="kelvin-bench-"))
    try:
        with running(scratch / "data", settings={"KELVIN_HOST_BYTES": str(6 << 30)}) as kelvin:
            for size_bytes in plan.sizes_bytes:
                _measure_size(plan, kelvin, scratch / f"model-{size_bytes}", size_bytes, measured)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Report(rows_of(measured), machine(), commit(), (HYPERVISOR_NOTE,))


def _measure_size(
    plan: Plan,
    kelvin: Installation,
    directory: Path,
    size_bytes: int,
    measured: dict[tuple[int, str, str], list[float]],
) -> None:
    name = f"bench-{size_bytes // 1_000_000}mb"
    plan.tell(f"making and pushing {name}")
    make_model(directory, size_bytes, plan.seed)
    weights = [directory / "model.safetensors"]
    kelvin.push(directory, name)
    kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    kelvin.door.first_token(name, PROMPT)  # the host tier holds it from here on
    with contextlib.ExitStack() as peers:
        host_floor = peers.enter_context(Peer("floor.py", str(directory), "host"))
        nvme_floor = peers.enter_context(Peer("floor.py", str(directory), "nvme"))
        resident = peers.enter_context(Peer("resident.py", str(directory)))
        for turn in range(plan.repeats):
            plan.tell(f"{name}: round {turn + 1} of {plan.repeats}")
            warm_page_cache(weights)
            kelvin.to_zero(name)
            measured[size_bytes, "host", KELVIN].append(kelvin.door.first_token(name, PROMPT))
            measured[size_bytes, "host", FLOOR].append(host_floor.start(PROMPT_IDS)[0])
            measured[size_bytes, "host", RESIDENT].append(resident.start(PROMPT_IDS)[0])
            measured[size_bytes, "host", FRESH].append(start_fresh(directory, PROMPT_IDS)[0])
            kelvin.to_zero(name)
            kelvin.forget("host")
            drop_page_cache(kelvin.nvme_files())
            measured[size_bytes, "nvme", KELVIN].append(kelvin.door.first_token(name, PROMPT))
            drop_page_cache(weights)
            measured[size_bytes, "nvme", FLOOR].append(nvme_floor.start(PROMPT_IDS)[0])
            drop_page_cache(weights)
            measured[size_bytes, "nvme", RESIDENT].append(resident.start(PROMPT_IDS)[0])
            drop_page_cache(weights)
            measured[size_bytes, "nvme", FRESH].append(start_fresh(directory, PROMPT_IDS)[0])
    kelvin.to_zero(name)
    shutil.rmtree(directory)
