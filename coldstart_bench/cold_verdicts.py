"""What `kelvin bench cold` has to show, judged from its rows. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from coldstart_bench.rows import KELVIN, Footprint, Row, StageRow
from coldstart_bench.verdicts import Verdict, held

MEDIUM_BYTES: Final = 400_000_000  # from "0.5 GB" up; below it, what any start costs is most of it
TIMES: Final = {"host": 1.35, "nvme": 1.25}
BOUND_S: Final = 0.050
BEYOND_MIB: Final = 256.0


def judge(
    sizes_bytes: Sequence[int], rows: Sequence[Row], stages: Sequence[StageRow], footprints: Mapping[int, Footprint]
) -> tuple[Verdict, ...]:
    """First tokens beside the frozen floor, time to bound from memory, and memory, of every size that was asked for;
    whether they hold, or were not measured.
    """
    ratios = {(row.size_bytes, row.tier): row.ratio_to_floor for row in rows if row.system == KELVIN}
    found = [
        held(
            "first token to the floor's, known answers included",
            size,
            tier,
            ratios.get((size, tier)),
            limit,
            at_least=False,
            asked=size >= MEDIUM_BYTES,
        )
        for size in sizes_bytes
        for tier, limit in TIMES.items()
    ]
    for size in sizes_bytes:
        bound_s = time_to_bound_s([row for row in stages if (row.size_bytes, row.tier) == (size, "host")])
        found.append(held("seconds from the request to bound", size, "host", bound_s, BOUND_S, at_least=False))
    for size in sizes_bytes:
        claim, taken = "MiB that a start takes beside the model's bytes", footprints.get(size)
        beyond = None if taken is None else taken.beyond_bytes / (1 << 20)
        found.append(held(claim, size, "", beyond, BEYOND_MIB, at_least=False))
    return tuple(found)


def time_to_bound_s(stages: Sequence[StageRow]) -> float | None:
    """The stages up to `bound`, of one size and tier; None where no start had it."""
    names = [row.stage for row in stages]
    return sum(row.median_s for row in stages[: names.index("bound") + 1]) if "bound" in names else None
