"""What `kelvin bench pool` has to show, judged from its rows. Pure."""

from collections.abc import Sequence
from typing import Final

from coldstart_bench.rows import Row
from coldstart_bench.verdicts import Verdict, held, ratio

OWN, WAITING = "a Service of its own", "a pod that waits"
TIMES: Final = 5.0


def judge(size_bytes: int, rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """How much sooner the first token comes; whether that is enough, or was not measured."""
    medians = {row.system: row.median_s for row in rows if row.size_bytes == size_bytes}
    claim = "first token from zero, a pod's start to a bind"
    times = ratio(medians.get(OWN), medians.get(WAITING))
    return (held(claim, size_bytes, "", times, TIMES, at_least=True),)
