"""The benches of the front door under load, as commands of `kelvin bench`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from coldstart_bench.installation import InstallationFailed
from coldstart_bench.peers import PeerFailed
from coldstart_bench.traffic import flood as flood_bench
from coldstart_bench.traffic import flood_rows
from coldstart_bench.traffic.flood_rows import FloodReport
from coldstart_bench.verdicts import Verdict

_JSON = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
AnyReport = FloodReport
R = TypeVar("R")


@click.command("flood")
@_JSON
@click.option("--requests", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="At once, of one.")
@click.option("--slots", default=16, show_default=True, type=click.IntRange(1, 1024), help="Of the replica.")
@click.option("--slot-ms", default=200.0, show_default=True, type=click.FloatRange(1, 60_000), help="Of each request.")
def flood(json_file: Path | None, requests: int, slots: int, slot_ms: float) -> None:
    """One tenant asks a thousand times at once, another one now and then: how long that one waits. Exit 1 where a line
    does not hold.
    """
    plan = flood_bench.FloodPlan(requests, slots, slot_ms / 1e3, tell)
    report = _tried(lambda: flood_bench.run(plan))
    _end(json_file, report, flood_rows.table(report))


def tell(line: str) -> None:
    """A step, on standard error."""
    print(line, file=sys.stderr, flush=True)


def _tried(run: Callable[[], R]) -> R:
    try:
        return run()
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed


def _end(json_file: Path | None, report: AnyReport, table: str) -> None:
    """Write, print, and end with 1 where a verdict is red."""
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    click.echo(table)
    click.echo(f"machine: {report.machine}  load before: {report.load_before:.2f}  commit: {report.commit}")
    for note in report.notes:
        click.echo(f"note: {note}")
    sys.exit(1 if is_red(report.verdicts) else 0)


def is_red(verdicts: tuple[Verdict, ...]) -> bool:
    """Whether any line does not hold."""
    return any(verdict.passed is False for verdict in verdicts)


ALL: tuple[click.Command, ...] = (flood,)
