"""`kelvin bench integrity`: damage chunks of a running installation at rest, tier by tier, then request the model.

A damaged chunk on NVMe must be healed from the store while the request waits. If the chunk is damaged in the store,
too, the request must be refused with the chunk's digest. The cache agent gets no hint. The same run measures the cost
of verification.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from coldstart_bench.harness.capacity_check import ResourceNeed, refusal
from coldstart_bench.harness.installation import Installation, InstallationFailed, running_installation
from coldstart_bench.harness.machine_state import drop_page_cache
from coldstart_bench.harness.program_runner import Program, make_model
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_least, at_most, ratio_or_none
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from coldstart_bench.suites.floor_bench import HYPERVISOR_NOTE
from kelvin.process.option_types import FiniteNumber

Fate = Literal["healed", "refused", "served wrong", "unexplained"]
TIERS: Final = ("nvme", "store")
TENANT: Final = "default"
MODEL: Final = "injured"
PROMPT: Final = "w1 w2 w3 w4"
CHUNK_BYTES: Final = 256 << 10  # small, so that a small model has many chunks
AT_ONCE: Final = 20
HEALED_SHARE: Final = 0.8
PATIENCE: Final = 60  # attempts while the circuit breaker is open, one per second
RATES: Final = 5
NEED: Final = ResourceNeed(disk_times=4.0, memory_times=3.0)
HOST_NOTE: Final = "host memory is sealed against all processes but the agent: no damage is injected there"


class InjectedDamage(msgspec.Struct, frozen=True):
    """Chunks damaged for one request from zero, in a tier (for the store: in all tiers), and the outcome."""

    tier: str
    kinds: tuple[str, ...]
    fate: Fate
    counted: int  # faults that the agent counted


class InjectionCounts(msgspec.Struct, frozen=True):
    """Injections of one tier by outcome."""

    tier: str
    injected: int
    healed: int
    refused: int
    served_wrong: int
    unexplained: int
    uncounted: int  # difference from the agent's own count


class IntegrityFigures(Figures, frozen=True):
    """Outcomes, and rates in bytes per second: verified from NVMe, and by plain O_DIRECT reads of its files."""

    tallies: tuple[InjectionCounts, ...]
    mended: bool
    verified_rate: float
    floor_rate: float


def classify_injection(answer: str | None, refusal: str, right: str, digests: Sequence[str], *, healable: bool) -> Fate:
    """Classify the outcome of a request with damaged chunks. `answer` is its text, or None if there was a `refusal`.
    Damage that can be healed must be healed; a refusal must name a chunk.
    """
    if answer is not None:
        if answer != right:
            return "served wrong"
        return "healed" if healable else "unexplained"
    named = any(digest in refusal for digest in digests)
    return "refused" if named and not healable else "unexplained"


def count_injections(injured: Sequence[InjectedDamage]) -> tuple[InjectionCounts, ...]:
    """Return the counts of each tier."""

    def row(tier: str) -> InjectionCounts:
        here = [each for each in injured if each.tier == tier]

        def count(fate: Fate) -> int:
            return sum(len(each.kinds) for each in here if each.fate == fate)

        return InjectionCounts(
            tier,
            injected=sum(len(each.kinds) for each in here),
            healed=count("healed"),
            refused=count("refused"),
            served_wrong=count("served wrong"),
            unexplained=count("unexplained"),
            uncounted=sum(abs(len(each.kinds) - each.counted) for each in here),
        )

    return tuple(map(row, TIERS))


def figures_of(
    injured: Sequence[InjectedDamage],
    mended: bool,
    verified: Sequence[float],
    floor: Sequence[float],
    notes: tuple[str, ...],
) -> IntegrityFigures:
    """Return the figures. `verified` and `floor` are rates of each round."""
    rates = median_of(verified).median, median_of(floor).median
    return IntegrityFigures(count_injections(injured), mended, *rates, notes=notes)


def judge(figures: IntegrityFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures: no wrong answer, all healable damage healed, the rest refused with the digest. The agent must
    have counted all damage on NVMe.
    """
    wrong = sum(each.served_wrong for each in figures.tallies)
    unexplained = sum(each.unexplained for each in figures.tallies)
    uncounted = sum(each.uncounted for each in figures.tallies if each.tier == "nvme")
    rate = ratio_or_none(figures.verified_rate, figures.floor_rate)
    return (
        at_most("answers from damaged bytes", wrong, 0),
        at_most("damaged, and neither healed nor refused by name", unexplained, 0),
        at_most("damaged, and not counted by the agent", uncounted, 0, "nvme"),
        at_least("served right once the store is mended (1: yes)", float(figures.mended), 1),
        at_least("rate of verified reads to plain ones", rate, 0.90, "nvme", is_checked=False),
    )


def table(figures: IntegrityFigures) -> str:
    """Return the figures as an aligned table."""
    rows: list[tuple[str, ...]] = [("damaged in", "chunks", "healed", "refused", "served wrong", "unexplained")]
    for each in figures.tallies:
        ends = (each.injected, each.healed, each.refused, each.served_wrong, each.unexplained)
        rows.append((each.tier, *map(str, ends)))
    rates = (
        f"NVMe, page cache dropped: {figures.verified_rate / 1e9:.2f} GB/s verified, "
        f"{figures.floor_rate / 1e9:.2f} GB/s of plain O_DIRECT reads of the same files"
    )
    return "\n".join([*align(rows), rates])


def _flip(right: bytes, other: bytes, source: random.Random) -> bytes:
    data = bytearray(right)
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


Damage = Callable[[bytes, bytes, random.Random], bytes]
KEEP_LENGTH: Final[dict[str, Damage]] = {
    "flipped bit": _flip,
    "zeroes": lambda right, other, source: bytes(len(right)),
    "another chunk": lambda right, other, source: other,
}
ALL: Final[dict[str, Damage]] = {
    **KEEP_LENGTH,
    "cut": lambda right, other, source: right[: source.randrange(len(right))],
    "longer": lambda right, other, source: right + bytes(4096),
}


@dataclass(frozen=True, slots=True)
class IntegrityPlan(BenchPlan):
    """Options of `kelvin bench integrity`."""

    size_bytes: int
    corruptions: int
    seed: int = 1


def run(plan: IntegrityPlan, scratch: Path) -> IntegrityFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    plan.tell("making and pushing a model")
    make_model(scratch / "model", plan.size_bytes, plan.seed)
    settings = {
        "KELVIN_CHUNK_BYTES": str(CHUNK_BYTES),
        "KELVIN_HOST_BYTES": str(plan.size_bytes + (1 << 30)),
        "KELVIN_BREAKER_S": "1",  # allow a retry soon after each injected failure
    }
    with running_installation(scratch / "data", settings=settings) as kelvin:
        version = kelvin.push(scratch / "model", MODEL, replicas=1)
        target = _InjectionTarget(kelvin, random.Random(plan.seed))  # noqa: S311 - no secret
        injured, mended = _inject_damage(plan, target)
        plan.tell("reading it verified, and plainly")
        verified, floor = _rates(kelvin, version)
    return figures_of(injured, mended, verified, floor, (HYPERVISOR_NOTE, HOST_NOTE))


class _InjectionTarget:
    """A model at zero, whole on NVMe, and those of its chunks that are in only one pack of the store."""

    def __init__(self, kelvin: Installation, randomness: random.Random) -> None:
        self.kelvin, self.randomness = kelvin, randomness
        self.right = self.complete()[0]
        if self.right is None:
            raise InstallationFailed("the model does not answer before anything is damaged")
        self.place_by_digest = _place_by_digest(kelvin)
        longest = max(length for _, _, length in self.place_by_digest.values())
        self.longest_chunks = sorted(
            digest for digest, (_, _, length) in self.place_by_digest.items() if length == longest
        )
        self.rest()

    def complete(self) -> tuple[str | None, str]:
        """Return (text, "") of an answer from zero, or (None, error). Waits while the circuit breaker is open."""
        for _ in range(PATIENCE):
            try:
                return self.kelvin.client.complete(MODEL, PROMPT, 4), ""
            except InstallationFailed as failed:
                error = str(failed)
            if '"breaker_open"' not in error:
                break
            time.sleep(1.0)  # KELVIN_BREAKER_S, which is also the refusal's Retry-After
        return None, error

    def rest(self) -> None:
        """Take the model to zero and out of host memory. Its chunks stay on NVMe."""
        self.kelvin.empty_tier("host")

    def files(self) -> dict[str, Path]:
        return {path.name: path for path in self.kelvin.nvme_files() if path.name in self.place_by_digest}

    def faults(self) -> int:
        """Return the agent's count of faulty chunks on NVMe."""
        return sum(self.kelvin.cache()["chunk_faults"].get("nvme", {}).values())

    def body(self, digest: str) -> bytes:
        pack, offset, length = self.place_by_digest[digest]
        with pack.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def damaged(self, digest: str, kind: str) -> bytes:
        """Return the chunk's bytes, damaged in this way. They differ, because a random model has no chunk of zeroes."""
        other = self.randomness.choice([each for each in self.longest_chunks if each != digest])
        return ALL[kind](self.body(digest), self.body(other), self.randomness)

    def write_pack(self, digest: str, body: bytes) -> None:
        """Overwrite the chunk in its pack with bytes of the same length."""
        pack, offset, _ = self.place_by_digest[digest]
        pack.chmod(0o600)
        with pack.open("r+b") as file:
            file.seek(offset)
            file.write(body)


def _place_by_digest(kelvin: Installation) -> dict[str, tuple[Path, int, int]]:
    """Return pack, offset and length of each chunk that is in only one pack, so that no other copy can heal it."""
    found: dict[str, list[tuple[Path, int, int]]] = {}
    store = kelvin.data / "store" / TENANT
    for index in (store / "index").iterdir():
        if not index.suffix:
            for digest, offset, length in json.loads(index.read_bytes()):
                found.setdefault(digest, []).append((store / "packs" / index.name, offset, length))
    return {digest: places[0] for digest, places in found.items() if len(places) == 1}


def _inject_damage(plan: IntegrityPlan, target: _InjectionTarget) -> tuple[list[InjectedDamage], bool]:
    """Return the outcome of each injection, and whether the model answers at the end as at the beginning."""
    to_heal = int(plan.corruptions * HEALED_SHARE)
    injured: list[InjectedDamage] = []
    while (left := to_heal - sum(len(each.kinds) for each in injured)) > 0:
        plan.tell(f"NVMe: {left} more")
        injured.append(_on_nvme(target, min(left, AT_ONCE, len(target.longest_chunks))))
    for number in range(plan.corruptions - to_heal):
        plan.tell(f"store: {plan.corruptions - to_heal - number} more")
        injured.append(_in_store(target, number))
    return injured, target.complete()[0] == target.right


def _on_nvme(target: _InjectionTarget, count: int) -> InjectedDamage:
    files = target.files()
    there = [digest for digest in target.longest_chunks if digest in files]
    bad = target.randomness.sample(there, min(count, len(there)))
    if not bad:
        raise InstallationFailed("no chunk is on NVMe")
    kinds = [list(ALL)[number % len(ALL)] for number in range(len(bad))]
    for digest, kind in zip(bad, kinds, strict=True):
        files[digest].write_bytes(target.damaged(digest, kind))
    before = target.faults()
    answer, refusal = target.complete()
    counted = target.faults() - before
    target.rest()
    assert target.right is not None
    fate = classify_injection(answer, refusal, target.right, bad, healable=True)
    return InjectedDamage("nvme", tuple(kinds), fate, counted)


def _in_store(target: _InjectionTarget, number: int) -> InjectedDamage:
    digest, kind = target.randomness.choice(target.longest_chunks), list(KEEP_LENGTH)[number % len(KEEP_LENGTH)]
    whole = target.body(digest)
    if (copy := target.files().get(digest)) is not None:
        copy.write_bytes(target.damaged(digest, kind))
    target.write_pack(digest, target.damaged(digest, kind))
    before = target.faults()
    answer, refusal = target.complete()
    counted = target.faults() - before
    target.write_pack(digest, whole)
    target.rest()
    assert target.right is not None
    fate = classify_injection(answer, refusal, target.right, [digest], healable=False)
    return InjectedDamage("store", (kind,), fate, counted)


def _rates(kelvin: Installation, version: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return rates in bytes per second: leases from NVMe, and plain reads by the best number of threads."""
    verified, floor = [], []
    with Program("kelvin_loader", str(kelvin.data / "run")) as ours, Program("floors.floor_read") as reader:
        for _ in range(RATES):
            kelvin.empty_tier("host")
            files = [path for path in kelvin.nvme_files() if path.stat().st_size]
            drop_page_cache(files)
            answer = ours.call(path=version, tenant=TENANT, device="cpu")
            verified.append(answer["bytes"] / answer["load_s"])
            plain = []
            for threads in (1, 2, 4):
                drop_page_cache(files)
                read = reader.call(files=[str(path) for path in files], threads=threads, direct=True)
                plain.append(read["bytes"] / read["seconds"])
            floor.append(max(plain))
    return verified, floor


BENCH: Final = Bench(
    "integrity",
    """Damage chunks of a running installation, tier by tier, and count which are healed, refused or served wrong.
    Exits with 1 if a claim fails.""",
    (
        option("--corruptions", 100, click.IntRange(5, 100_000), "Number of chunks to damage."),
        option(
            "--size", 0.1, FiniteNumber(0.05, 16), "GB of the model.", "size_bytes", convert=lambda gb: int(gb * 1e9)
        ),
    ),
    IntegrityPlan,
    run,
    table,
    judge,
    lambda plan, disk, memory: refusal([plan.size_bytes], NEED, disk, memory),
)
