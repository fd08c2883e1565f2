"""`python -m coldstart_bench`: the benches of `kelvin bench`, and the drill of `kelvin drill`."""

import signal
import sys
from typing import Any, Final

import click

from coldstart_bench.suites import (
    burst_bench,
    cold_bench,
    flood_bench,
    floor_bench,
    front_bench,
    integrity_bench,
    ledger_bench,
    load_bench,
    overload_bench,
    pool_bench,
    recovery_drill,
    soak_bench,
    storm_bench,
    trace_bench,
)
from coldstart_bench.suites import fleet_bench as fleet
from coldstart_bench.suites.bench_runner import Bench

BENCHES: Final[tuple[Bench[Any, Any], ...]] = (
    floor_bench.BENCH,
    load_bench.BENCH,
    cold_bench.BENCH,
    pool_bench.BENCH,
    storm_bench.BENCH,
    front_bench.BENCH,
    burst_bench.BENCH,
    flood_bench.BENCH,
    overload_bench.BENCH,
    fleet.BENCH,
    soak_bench.BENCH,
    trace_bench.BENCH,
    integrity_bench.BENCH,
    ledger_bench.BENCH,
    recovery_drill.BENCH,
)

main: Final = click.Group(
    "bench", {bench.name: bench.command() for bench in BENCHES}, help="Measure Kelvin on this machine."
)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # exits run the clean-up
    main()
