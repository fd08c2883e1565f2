"""What `kelvin bench cold` measures of one size, in the order of a round: us, the floor and others, tier by tier.

Each case makes the state that it starts from and checks it; one that can't be made costs that round's figure alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from coldstart_bench.environment import drop_page_cache, warm_page_cache
from coldstart_bench.installation import Installation, InstallationFailed
from coldstart_bench.peers import start_fresh
from coldstart_bench.programs import Program
from coldstart_bench.rows import FLOOR, KELVIN, StageKey
from coldstart_bench.tally import Tally

PROMPT_TOKENS: Final = 16
PROMPT_IDS: Final = tuple(range(7, 7 + PROMPT_TOKENS))
PROMPT: Final = " ".join(f"w{token - 2}" for token in PROMPT_IDS)  # the tokenizer of make_model: w<n> is token n + 2
FRESH, RESIDENT = "from_pretrained", "resident transformers"
STEP_WITH, STEP_WITHOUT = "first step with the probe", "first step without"
TENANT: Final = "default"


@dataclass(frozen=True, slots=True)
class Case:
    """A system from a tier. `prepare` raises CacheNotAsAsked; `start` is one, its seconds to the first token."""

    tier: str
    system: str
    prepare: Callable[[], object]
    start: Callable[[], float]

    def measure(self) -> float:
        """From its state."""
        self.prepare()
        return self.start()


def measure_round(tally: Tally[float], size_bytes: int, cases: Sequence[Case]) -> None:
    """Each case once, in order."""
    for case in cases:
        tally.take((size_bytes, case.tier, case.system), case.measure)


@dataclass(slots=True)
class Ours:
    """One version of a running installation, started from any tier; its stages' own seconds are kept."""

    kelvin: Installation
    name: str
    size_bytes: int
    chunks: int  # of the version, in the NVMe tier
    stages: dict[StageKey, list[float]]

    def ready_on_host(self) -> None:
        """In slabs, whatever was measured before; nothing runs."""
        self.kelvin.door.first_token(self.name, PROMPT)
        self._wait_for_nvme()
        self.kelvin.to_zero(self.name)
        self.kelvin.rest()

    def ready_on_nvme(self) -> None:
        """Leave the model's chunks in NVMe files outside the page cache, and in no faster tier."""
        self._wait_for_nvme()
        self.kelvin.forget("host")
        self.kelvin.rest()
        drop_page_cache(self.kelvin.nvme_files())

    def ready_in_store(self) -> None:
        """Leave the model's chunks in the store, and in no faster tier."""
        for tier in ("host", "nvme"):
            self.kelvin.forget(tier)
        self.kelvin.rest()
        drop_page_cache(self.kelvin.store_files())

    def _wait_for_nvme(self) -> None:
        """What is being admitted shares the disk with whatever is measured."""
        self.kelvin.wait(lambda: chunks_on_nvme(self.kelvin) == self.chunks, "the NVMe tier holds the version")

    def start(self, tier: str) -> float:
        """Its timeline is asked for afterwards, and from where its bytes came."""
        before = _bytes_read(self.kelvin)
        seconds, request_id = self.kelvin.door.start(self.name, PROMPT)
        read = {source for source, total in _bytes_read(self.kelvin).items() if total > before.get(source, 0)}
        if read != {tier} - {"host"}:
            raise InstallationFailed(f"{self.name}: bytes came from {sorted(read)} where '{tier}' is measured")
        before_us = 0
        for stamp in self.kelvin.door.request("GET", f"/v1/requests/{request_id}/timeline")["stamps"]:
            key = (self.size_bytes, tier, stamp["stage"])
            self.stages.setdefault(key, []).append((stamp["at_us"] - before_us) / 1e6)
            before_us = stamp["at_us"]
        return seconds


@dataclass(frozen=True, slots=True)
class Beside:
    """The others: processes that stay, and the files that were pushed."""

    directory: Path
    host_floor: Program
    nvme_floor: Program
    resident: Program
    engine: Program

    @property
    def weights(self) -> list[Path]:
        return [self.directory / "model.safetensors"]


def cases_of(ours: Ours, version: str, beside: Beside) -> tuple[Case, ...]:
    """A round of them."""
    hot, cold = partial(warm_page_cache, beside.weights), partial(drop_page_cache, beside.weights)
    resident, fresh = partial(beside.resident.timed, PROMPT_IDS), lambda: start_fresh(beside.directory, PROMPT_IDS)[0]
    at_zero = partial(ours.kelvin.to_zero, ours.name)

    def step(probe: bool) -> float:
        answer = beside.engine.ask(tenant=TENANT, version=version, ids=list(PROMPT_IDS), probe=probe)
        return float(answer["seconds"])

    return (
        Case("host", KELVIN, ours.ready_on_host, partial(ours.start, "host")),
        Case("host", FLOOR, _nothing, partial(beside.host_floor.timed, PROMPT_IDS)),
        Case("host", RESIDENT, hot, resident),
        Case("host", FRESH, hot, fresh),
        Case("host", STEP_WITH, at_zero, partial(step, True)),
        Case("host", STEP_WITHOUT, at_zero, partial(step, False)),
        Case("nvme", KELVIN, ours.ready_on_nvme, partial(ours.start, "nvme")),
        Case("nvme", FLOOR, cold, partial(beside.nvme_floor.timed, PROMPT_IDS)),
        Case("nvme", RESIDENT, cold, resident),
        Case("nvme", FRESH, cold, fresh),
        Case("store", KELVIN, ours.ready_in_store, partial(ours.start, "store")),
        Case("store", FLOOR, cold, partial(beside.nvme_floor.timed, PROMPT_IDS)),
    )


def _nothing() -> None:
    """Its bytes are its own memory's, or were just read."""


def chunks_on_nvme(kelvin: Installation) -> int:
    """That its index has."""
    return int(kelvin.admin.request("GET", "/admin/v1/cache")["nvme"]["chunks"])


def _bytes_read(kelvin: Installation) -> dict[str, int]:
    """By tier, since the agent started."""
    found: dict[str, int] = kelvin.admin.request("GET", "/admin/v1/cache")["bytes_read"]
    return found
