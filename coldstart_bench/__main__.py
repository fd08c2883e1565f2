"""`python -m coldstart_bench`: the benchmarks of `kelvin bench`, and the drill of `kelvin drill`."""

import signal
import sys
from typing import Any, Final

import click

from coldstart_bench import cold, floors, front, integrity, ledger, load, pool, recovery, storm
from coldstart_bench.fleet import bench as fleet
from coldstart_bench.frame import Bench
from coldstart_bench.traffic import burst, flood, overload, soak, trace

BENCHES: Final[tuple[Bench[Any, Any], ...]] = (
    floors.BENCH,
    load.BENCH,
    cold.BENCH,
    pool.BENCH,
    storm.BENCH,
    front.BENCH,
    burst.BENCH,
    flood.BENCH,
    overload.BENCH,
    fleet.BENCH,
    soak.BENCH,
    trace.BENCH,
    integrity.BENCH,
    ledger.BENCH,
    recovery.BENCH,
)

main: Final = click.Group(
    "bench", {bench.name: bench.command() for bench in BENCHES}, help="Measure Kelvin on this machine."
)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was made is taken away
    main()
