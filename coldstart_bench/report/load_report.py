"""Figures of `kelvin bench load`: the contenders, their rows next to the floors of the same run, and the claims."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from coldstart_bench.report.bench_report import (
    ClaimVerdict,
    Figures,
    Key,
    align,
    at_least,
    at_most,
    cell,
    ratio_or_none,
)
from coldstart_bench.report.order_statistics import median_of

State = Literal["cold", "hot", "host"]
STATES: Final[tuple[str, ...]] = ("cold", "hot", "host")
FROM_DISK: Final[tuple[State, ...]] = ("cold", "hot")
LARGE_BYTES: Final = 1_900_000_000  # a model of "2 GB" is only about that large, because layers are whole
FLOOR_SHARE: Final = 0.90
TENSORIZER_TIMES: Final = 2.0
UNVERIFIED_TIMES: Final = 1.6
BOUND_S: Final = 0.050


@dataclass(frozen=True, slots=True)
class Contender:
    """A loader to measure. `package` is its requirement besides torch; `file` is the kind of its `path`."""

    name: str
    program: str
    package: str | None
    verifies: bool
    file: Literal["version", "safetensors", "tensors", "directory"]
    arguments: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether its package is installed. Nothing is imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


KELVIN: Final = Contender("kelvin", "kelvin_loader", None, True, "version")
TENSORIZER_VERIFY: Final = Contender(
    "tensorizer-verify", "rival_loaders", "tensorizer", True, "tensors", ("tensorizer", "verify")
)
PEERS: Final = (
    Contender("tensorizer", "rival_loaders", "tensorizer", False, "tensors", ("tensorizer",)),
    TENSORIZER_VERIFY,
    Contender("safetensors", "rival_loaders", "safetensors", False, "safetensors", ("safetensors",)),
    Contender("mmap", "rival_loaders", None, False, "safetensors", ("mmap",)),
    Contender("runai", "rival_loaders", "runai_model_streamer", False, "safetensors", ("runai",)),
    Contender("fastsafetensors", "rival_loaders", "fastsafetensors", False, "safetensors", ("fastsafetensors",)),
    Contender("from_pretrained", "rival_loaders", "transformers", False, "directory", ("from_pretrained",)),
)
ALL: Final = (KELVIN, *PEERS)
VERIFYING: Final = frozenset(contender.name for contender in ALL if contender.verifies)


def choose_contenders(names: Sequence[str]) -> tuple[Contender, ...]:
    """Return the contenders of these names, or all. Raises ValueError with an unknown name."""
    known = {contender.name: contender for contender in ALL}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]}: must be of {', '.join(known)}")
    return tuple(contender for contender in ALL if not names or contender.name in names)


class LoadTiming(msgspec.Struct, frozen=True):
    """One load: seconds until the tensors exist, then seconds until a consumer has read every byte."""

    load_s: float
    consume_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.consume_s


class LoadRow(msgspec.Struct, frozen=True):
    """One loader at one size from one state: medians, and the interval of the total. `floor` rows only read files."""

    size_bytes: int
    state: str
    system: str
    verifies: bool
    load_s: float
    consume_s: float
    total_s: float
    low_s: float
    high_s: float
    n: int
    total_to_floor: float | None  # ratio to the fastest floor of the same size and state, without a consumer


class LoadFigures(Figures, frozen=True):
    """Load times of all loaders."""

    rows: tuple[LoadRow, ...]
    device: str


Floors = Mapping[Key, Sequence[float]]  # seconds of plain reads


def rows_of(takes: Mapping[Key, Sequence[LoadTiming]], floors: Floors) -> tuple[LoadRow, ...]:
    """Return rows sorted by size, state and total, floors first."""
    best: dict[tuple[int, str], float] = {}
    for (size, state, _), seconds in floors.items():
        median = median_of(seconds).median
        best[size, state] = min(median, best.get((size, state), median))
    rows = [
        _row(key, [LoadTiming(each, 0.0) for each in seconds], best.get(key[:2]), verifies=False)
        for key, seconds in floors.items()
    ]
    rows.sort(key=lambda row: (row.size_bytes, STATES.index(row.state), row.total_s))
    loads = [_row(key, each, best.get(key[:2]), verifies=key[2] in VERIFYING) for key, each in takes.items()]
    loads.sort(key=lambda row: (row.size_bytes, STATES.index(row.state), row.total_s))
    return tuple(
        row
        for size in sorted({row.size_bytes for row in loads})
        for state in STATES
        for row in (*rows, *loads)
        if (row.size_bytes, row.state) == (size, state)
    )


def _row(key: Key, takes: Sequence[LoadTiming], floor_s: float | None, *, verifies: bool) -> LoadRow:
    total = median_of([take.total_s for take in takes])
    return LoadRow(
        *key,
        verifies=verifies,
        load_s=median_of([take.load_s for take in takes]).median,
        consume_s=median_of([take.consume_s for take in takes]).median,
        total_s=total.median,
        low_s=total.low,
        high_s=total.high,
        n=total.n,
        total_to_floor=None if floor_s is None else total.median / floor_s,
    )


def is_floor(row: LoadRow) -> bool:
    """Return whether the row is a plain read."""
    return row.system.startswith("floor")


def judge(figures: LoadFigures) -> tuple[ClaimVerdict, ...]:
    """Judge every size that was measured. No claim decides."""
    sizes = sorted({row.size_bytes for row in figures.rows})
    return tuple(
        verdict for size in sizes for verdict in _judged([row for row in figures.rows if row.size_bytes == size])
    )


def _judged(rows: Sequence[LoadRow]) -> list[ClaimVerdict]:
    size = rows[0].size_bytes
    ours = {row.state: row for row in rows if row.system == KELVIN.name}
    total, load = (
        {state: row.total_s for state, row in ours.items()},
        {state: row.load_s for state, row in ours.items()},
    )
    peers = frozenset(row.system for row in rows if not is_floor(row)) - {KELVIN.name}
    floor = min((row.total_s for row in rows if is_floor(row) and row.state == "cold"), default=None)

    def least(state: State, systems: frozenset[str]) -> float | None:
        return min((row.total_s for row in rows if row.state == state and row.system in systems), default=None)

    def say(claim: str, state: State, value: float | None, limit: float, *, is_checked: bool = True) -> ClaimVerdict:
        return at_least(claim, value, limit, state, size, is_checked=is_checked, decides=False)

    disk = ratio_or_none(floor, load.get("cold"))
    verifying, tensorizer = (
        {state: ratio_or_none(least(state, systems), total.get(state)) for state in FROM_DISK}
        for systems in (peers & VERIFYING, frozenset({TENSORIZER_VERIFY.name}))
    )
    from_disk = ratio_or_none(least("cold", peers), total.get("cold"))
    from_memory = ratio_or_none(least("hot", peers), total.get("host"))
    hot = ratio_or_none(total.get("hot"), least("hot", peers - VERIFYING))
    return [
        say(
            "rate of the verified restore to the disk's O_DIRECT rate",
            "cold",
            disk,
            FLOOR_SHARE,
            is_checked=size >= LARGE_BYTES,
        ),
        *(say("time of the fastest verifying loader to ours", state, verifying[state], 1.0) for state in FROM_DISK),
        *(
            say("time of tensorizer with verify_hash to ours", state, tensorizer[state], TENSORIZER_TIMES)
            for state in FROM_DISK
        ),
        say("time of the fastest loader to ours", "cold", from_disk, 1.0),
        say("time of the fastest loader, page cache hot, to ours", "host", from_memory, 1.0),
        at_most("our time to the fastest unverified loader's", hot, UNVERIFIED_TIMES, "hot", size, decides=False),
        at_most(
            "seconds until tensors are bound to verified bytes", load.get("host"), BOUND_S, "host", size, decides=False
        ),
    ]


def table(figures: LoadFigures) -> str:
    """Return the figures as an aligned table."""
    rows: list[tuple[str, ...]] = [
        ("size", "state", "loader", "checks", "load", "consume", "total", "95 % interval", "GB/s", "n", "/ floor")
    ]
    for row in figures.rows:
        interval = f"{row.low_s * 1e3:.1f} - {row.high_s * 1e3:.1f}"
        times = (f"{each * 1e3:.1f}ms" for each in (row.load_s, row.consume_s, row.total_s))
        rate = f"{row.size_bytes / row.total_s / 1e9:.2f}"
        beside = cell(row.total_to_floor, "{:.2f}x", none="")
        named = (f"{row.size_bytes / 1e9:.2f}GB", row.state, row.system, "yes" if row.verifies else "-")
        rows.append((*named, *times, interval, rate, str(row.n), beside))
    return "\n".join(align(rows, left=4))
