"""The benches of the front door under load, as commands of `kelvin bench`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from coldstart_bench.fleet import bench as fleet_bench
from coldstart_bench.fleet import rows as fleet_rows
from coldstart_bench.fleet.rows import FleetReport
from coldstart_bench.installation import InstallationFailed
from coldstart_bench.peers import PeerFailed
from coldstart_bench.traffic import burst as burst_bench
from coldstart_bench.traffic import burst_rows, flood_rows, overload_rows, soak_rows, trace_fit, trace_source
from coldstart_bench.traffic import flood as flood_bench
from coldstart_bench.traffic import overload as overload_bench
from coldstart_bench.traffic import soak as soak_bench
from coldstart_bench.traffic import trace as trace_bench
from coldstart_bench.traffic.burst_rows import BurstReport
from coldstart_bench.traffic.flood_rows import FloodReport
from coldstart_bench.traffic.overload_rows import OverloadReport
from coldstart_bench.traffic.soak_rows import SoakReport
from coldstart_bench.traffic.trace_fit import TraceReport
from coldstart_bench.verdicts import Verdict
from service.arguments import Number

_JSON = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
AnyReport = BurstReport | FleetReport | FloodReport | OverloadReport | SoakReport | TraceReport
R = TypeVar("R")


@click.command("flood")
@_JSON
@click.option("--requests", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="At once, of one.")
@click.option("--slots", default=16, show_default=True, type=click.IntRange(1, 1024), help="Of the replica.")
@click.option("--slot-ms", default=200.0, show_default=True, type=Number(1, 60_000), help="Of each request.")
def flood(json_file: Path | None, requests: int, slots: int, slot_ms: float) -> None:
    """One tenant asks a thousand times at once, another one now and then: how long that one waits. Exit 1 where a line
    does not hold.
    """
    plan = flood_bench.FloodPlan(requests, slots, slot_ms / 1e3, tell)
    report = _tried(lambda: flood_bench.run(plan))
    _end(json_file, report, flood_rows.table(report))


@click.command("burst")
@_JSON
@click.option("--requests", default=1000, show_default=True, type=click.IntRange(2, 10_000), help="At once, in all.")
def burst(json_file: Path | None, requests: int) -> None:
    """A thousand requests of two tenants at once for a model at zero, of an installation: answers, their order, and
    memory. Exit 1 where a line does not hold.
    """
    report = _tried(lambda: burst_bench.run(burst_bench.BurstPlan(requests, tell)))
    _end(json_file, report, burst_rows.table(report))


@click.command("overload")
@_JSON
@click.option("--slots", default=20, show_default=True, type=click.IntRange(1, 1024), help="Of the replica.")
@click.option("--slot-ms", default=100.0, show_default=True, type=Number(1, 60_000), help="Of each request.")
@click.option("--times", default="0.5,1,2,5,10", show_default=True, help="What the slots can do, so often.")
@click.option("--seconds", default=10.0, show_default=True, type=Number(0.5, 3600), help="Of each step.")
@click.option(
    "--deadline-ms", default=2000, show_default=True, type=click.IntRange(10, 600_000), help="Of each request."
)
def overload(json_file: Path | None, slots: int, slot_ms: float, times: str, seconds: float, deadline_ms: int) -> None:
    """More load than the replicas can do, of all three priorities: what is answered in time, who is refused, and how
    memory goes. Exit 1 where a line does not hold.
    """
    try:
        wanted = overload_bench.times_of(times)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--times") from None
    plan = overload_bench.OverloadPlan(slots, slot_ms / 1e3, wanted, seconds, deadline_ms / 1e3, tell)
    report = _tried(lambda: overload_bench.run(plan))
    _end(json_file, report, overload_rows.table(report))


@click.command("trace")
@_JSON
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--clients",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A client's windows of rates, as ServeGen has them; each is a tenant. [default: FILE's own times, one tenant]",
)
@click.option("--at", default=0.0, show_default=True, type=Number(0), help="Second of the clients' windows.")
@click.option("--seconds", default=60.0, show_default=True, type=Number(1, 86_400), help="Of the clients.")
@click.option("--requests", default=2000, show_default=True, type=click.IntRange(2, 1_000_000), help="About so many.")
@click.option("--speed", default=20.0, show_default=True, type=Number(0.01, 10_000), help="Of FILE's own times.")
@click.option("--shared-prefix", default=0.0, show_default=True, type=Number(0, 1), help="Of a prompt; FILE has none.")
@click.option("--slots", default=64, show_default=True, type=click.IntRange(1, 1024), help="Of the replica.")
@click.option("--seed", default=1, show_default=True, type=int, help="Of what is drawn.")
def trace(
    json_file: Path | None,
    file: Path,
    clients: tuple[Path, ...],
    at: float,
    seconds: float,
    requests: int,
    speed: float,
    shared_prefix: float,
    slots: int,
    seed: int,
) -> None:
    """Send what FILE says (TIMESTAMP, ContextTokens, GeneratedTokens, as Azure has it) and print how close it came to
    that: lengths, bursts, tenants, prefixes. Exit 1 where a line does not hold.
    """
    rows = _read(file, trace_source.rows_of)
    windows = trace_bench.windows_at([_read(client, trace_source.windows_of) for client in clients], at)
    plan = trace_bench.TracePlan(rows, windows, requests, seconds, speed, shared_prefix, slots, seed, tell)
    try:
        report = _tried(lambda: trace_bench.run(plan))
    except trace_source.BadTrace as error:
        raise click.ClickException(str(error)) from None
    _end(json_file, report, trace_fit.table(report))


@click.command("soak")
@_JSON
@click.option("--seconds", default=600.0, show_default=True, type=Number(5, 604_800), help="Of load.")
@click.option("--rate", default=10.0, show_default=True, type=Number(0.1, 1000), help="Requests a second.")
@click.option("--every", default=10.0, show_default=True, type=Number(1, 3600), help="Seconds to a fault.")
@click.option("--seed", default=1, show_default=True, type=int, help="Of what is drawn.")
def soak(json_file: Path | None, seconds: float, rate: float, every: float, seed: int) -> None:
    """An installation under load whose processes are killed in turn, whose clients stall and whose clock is stepped:
    how each request ended, and whether the bill agrees. Exit 1 where a line does not hold.
    """
    report = _tried(lambda: soak_bench.run(soak_bench.SoakPlan(seconds, rate, every, seed, tell)))
    _end(json_file, report, soak_rows.table(report))


@click.command("fleet")
@_JSON
@click.option("--sizes", default="100,1000,3000,10000", show_default=True, help="Models, separated by commas.")
@click.option("--active", default=200, show_default=True, type=click.IntRange(1, 100_000), help="In use, of these.")
@click.option("--ticks", default=30, show_default=True, type=click.IntRange(1, 10_000), help="Of the scaler.")
def fleet(json_file: Path | None, sizes: str, active: int, ticks: int) -> None:
    """Many models, few of them in use: what a tick, a look-up, a start and an idle model take, and how that grows.
    Exit 1 where a line does not hold.
    """
    try:
        wanted = fleet_bench.sizes_of(sizes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes") from None
    report = _tried(lambda: fleet_bench.run(fleet_bench.FleetPlan(wanted, active, ticks, tell)))
    _end(json_file, report, fleet_rows.table(report))


def _read(file: Path, parse: Callable[[str], R]) -> R:
    try:
        return parse(file.read_text())
    except (trace_source.BadTrace, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file}: {error}") from None


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


ALL: tuple[click.Command, ...] = (burst, fleet, flood, overload, soak, trace)
