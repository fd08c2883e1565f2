"""What `kelvin bench cold` has to show, judged from its rows. Pure."""

from collections.abc import Sequence
from typing import Final

from coldstart_bench.rows import KELVIN, Footprint, Row, StageRow
from coldstart_bench.verdicts import Verdict, held

MEDIUM_BYTES: Final = 400_000_000  # from "0.5 GB" up; below it, what any start costs is most of it
TIMES: Final = {"host": 1.35, "nvme": 1.25}
BOUND_S: Final = 0.050
BEYOND_MIB: Final = 256.0


def judge(rows: Sequence[Row], stages: Sequence[StageRow], footprints: Sequence[Footprint]) -> tuple[Verdict, ...]:
    """First tokens beside the frozen floor, time to bound from memory, and memory; whether they hold or not."""
    found = [
        held(
            "first token to the floor's, known answers included",
            row.size_bytes,
            row.tier,
            row.ratio_to_floor,
            TIMES[row.tier],
            at_least=False,
            asked=row.size_bytes >= MEDIUM_BYTES,
        )
        for row in rows
        if row.system == KELVIN and row.tier in TIMES
    ]
    for size in sorted({row.size_bytes for row in rows}):
        bound_s = time_to_bound_s([row for row in stages if (row.size_bytes, row.tier) == (size, "host")])
        found.append(held("seconds from the request to bound", size, "host", bound_s, BOUND_S, at_least=False))
    for taken in footprints:
        claim, beyond = "MiB that a start takes beside the model's bytes", taken.beyond_bytes / (1 << 20)
        found.append(held(claim, taken.model_bytes, "", beyond, BEYOND_MIB, at_least=False))
    return tuple(found)


def time_to_bound_s(stages: Sequence[StageRow]) -> float | None:
    """The stages up to `bound`, of one size and tier; None where no start had it."""
    names = [row.stage for row in stages]
    return sum(row.median_s for row in stages[: names.index("bound") + 1]) if "bound" in names else None
