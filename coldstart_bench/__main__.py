"""`python -m coldstart_bench`: the benchmarks of `kelvin bench`."""

import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click
import msgspec

from coldstart_bench import cold as cold_bench
from coldstart_bench import contenders, room
from coldstart_bench import floors as floor_bench
from coldstart_bench import front as front_bench
from coldstart_bench import integrity as integrity_bench
from coldstart_bench import ledger as ledger_bench
from coldstart_bench import load as load_bench
from coldstart_bench import plots as plots_bench
from coldstart_bench import pool as pool_bench
from coldstart_bench import storm as storm_bench
from coldstart_bench.environment import free_memory_bytes
from coldstart_bench.failures import failure_line
from coldstart_bench.front_rows import FrontReport
from coldstart_bench.front_rows import table as front_table
from coldstart_bench.installation import InstallationFailed
from coldstart_bench.integrity_rows import IntegrityReport
from coldstart_bench.integrity_rows import table as integrity_table
from coldstart_bench.load_rows import LoadReport
from coldstart_bench.load_rows import table as load_table
from coldstart_bench.peers import PeerFailed
from coldstart_bench.recovery import drill
from coldstart_bench.recovery_report import report_json
from coldstart_bench.recovery_report import table as report_table
from coldstart_bench.rows import Report, stage_table, table
from coldstart_bench.storm_rows import StormReport
from coldstart_bench.storm_rows import table as storm_table
from coldstart_bench.traffic import commands as traffic
from coldstart_bench.verdicts import line_of
from service.arguments import Number

_JSON = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
_PLOTS = click.option(
    "--plots", type=click.Path(path_type=Path, file_okay=False), help="Also draw the report into this directory (PNG)."
)
_LARGE = click.option("--large", is_flag=True, help="Sizes up to 16 GB as well.")


@click.group()
def main() -> None:
    """Measure Kelvin on this machine."""


@main.command("floor")
@_JSON
@click.option("--size", default=1.0, show_default=True, type=Number(0.001, 1000), help="GB, without FILES.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def floor(json_file: Path | None, size: float, repeats: int, files: tuple[Path, ...]) -> None:
    """What this machine can do at most with the bytes of a cold start: read FILES (or one that is made up), copy, hash,
    fork.
    """
    try:
        report = floor_bench.run(floor_bench.FloorPlan(files, int(size * 1e9), repeats, _tell))
    except OSError as error:
        raise click.ClickException(str(error)) from error
    _write(json_file, report)
    click.echo(floor_bench.table(report))
    _tell_where(report)


@main.command("load")
@_JSON
@_PLOTS
@_LARGE
@click.option("--sizes", default="0.1,0.5,2", show_default=True, help="Model sizes in GB, separated by commas.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 1000), help="Rounds per size.")
@click.option("--loaders", default="", help="Only these, separated by commas. [default: all]")
@click.option("--device", default="cpu", show_default=True, help="Where tensors have to be: cpu, cuda or cuda:N.")
def load(
    json_file: Path | None, plots: Path | None, large: bool, sizes: str, repeats: int, loaders: str, device: str
) -> None:
    """From a disk or from memory until every byte was read: ours, and the loaders that a user would pick instead.

    Whoever is not installed, fails, or gives other bytes is printed.
    """
    sizes_bytes = _sizes(sizes, large, load_bench.NEED)
    _check_plots(plots)
    try:
        who = contenders.chosen([name for name in loaders.split(",") if name])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--loaders") from None
    try:
        report = load_bench.run(load_bench.LoadPlan(sizes_bytes, repeats, who, device, _tell))
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    if plots is not None:
        plots_bench.draw_load(report, plots)
    click.echo(load_table(report))
    _tell_where(report)
    sys.exit(1 if any(failed.size_bytes is not None for failed in report.failures) else 0)


@main.command("cold")
@_JSON
@_PLOTS
@_LARGE
@click.option("--sizes", default="0.1,0.5,2", show_default=True, help="Model sizes in GB, separated by commas.")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds per size.")
def cold(json_file: Path | None, plots: Path | None, large: bool, sizes: str, repeats: int) -> None:
    """First token from zero, by tier, beside the floor and what a user would pick instead.

    What has no figure is printed with the reason, and makes the exit 1.
    """
    sizes_bytes = _sizes(sizes, large, cold_bench.NEED)
    _check_plots(plots)

    def known(size_bytes: int, so_far: Report) -> None:
        _write(json_file, so_far)
        click.echo(table([row for row in so_far.rows if row.size_bytes == size_bytes]))

    report = cold_bench.run(cold_bench.Plan(sizes_bytes, repeats, _tell, known))
    if plots is not None:
        plots_bench.draw_cold(report, plots)
    click.echo("stages of our starts, and what they are of the floor's time:")
    click.echo(stage_table(report.stages, report.rows))
    for failed in report.failures:
        click.echo(failure_line(failed))
    for verdict in report.verdicts:
        click.echo(line_of(verdict))
    _tell_where(report)
    sys.exit(1 if report.failures else 0)


@main.command("pool")
@_JSON
@click.option("--size", default=0.1, show_default=True, type=Number(0.05, 100), help="GB of the model.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
def pool(json_file: Path | None, size: float, repeats: int) -> None:
    """First token from zero by the start of a pod, and by a bind of one that waits."""
    plan = pool_bench.PoolPlan(int(size * 1e9), repeats, _tell)
    _check_room(pool_bench.NEED.disk(plan.size_bytes), pool_bench.NEED.memory(plan.size_bytes))
    try:
        report = pool_bench.run(plan)
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    click.echo(table(report.rows))
    for failed_one in report.failures:
        click.echo(failure_line(failed_one))
    for verdict in report.verdicts:
        click.echo(line_of(verdict))
    _tell_where(report)
    sys.exit(1 if report.failures else 0)


@main.command("storm")
@_JSON
@click.option("--waiters", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="For one model.")
@click.option("--agents", default=8, show_default=True, type=click.IntRange(1, 64), help="Each as if it were a node.")
@click.option("--models", default=30, show_default=True, type=click.IntRange(1, 200), help="Missing at once, at each.")
@click.option("--model-mib", default=16, show_default=True, type=click.IntRange(1, 1024), help="Of each of them.")
@click.option("--line", default=0.2, show_default=True, type=Number(0.001, 100), help="GB/s, of the store.")
def storm(json_file: Path | None, waiters: int, agents: int, models: int, model_mib: int, line: float) -> None:
    """Many requests for a model at zero; many models missing at once: what leaves the store, and who waits how long."""
    plan = storm_bench.StormPlan(waiters, agents, models, model_mib << 20, line * 1e9, _tell)
    _check_room(storm_bench.disk_bytes(plan), storm_bench.memory_bytes(plan))
    try:
        report = storm_bench.run(plan)
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    click.echo(storm_table(report))
    _tell_where(report)
    not_right = report.waiters.answered < waiters or report.waiters.wrong
    sys.exit(1 if report.miss.failures or report.peered.failures or not_right else 0)


@main.command("front")
@_JSON
@click.option("--connections", default="1,16,64", show_default=True, help="At once, separated by commas.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 1000), help="Of all systems in turn.")
@click.option("--seconds", default=5, show_default=True, type=click.IntRange(1, 3600), help="Of each load.")
@click.option("--loader", default="wrk", show_default=True, type=click.Choice(["wrk", "own"]), help="Who asks.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Ray Serve and LiteLLM, too.")
def front(
    json_file: Path | None, connections: str, rounds: int, seconds: int, loader: front_bench.Loader, *, peers: bool
) -> None:
    """What the front door adds to a request, beside its upstream alone, nginx as a TLS proxy, Ray Serve and LiteLLM;
    and what streams cost.

    wrk and nginx: as installed, or `make bench-tools`; Ray Serve and LiteLLM: `make bench-peers`. Who is not installed
    is not measured.
    """
    try:
        number = front_bench.connections_of(connections)
        plan = front_bench.FrontPlan(number, rounds, seconds, loader, peers, _tell)
        report = front_bench.run(plan)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--connections") from None
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    click.echo(front_table(report))
    _tell_where(report)
    unanswered = not report.streams.tokens or any(row.requests_per_s == 0 for row in report.rows)
    sys.exit(1 if unanswered or report.unrecorded or any(row.bad for row in report.rows) else 0)


@main.command("integrity")
@_JSON
@click.option("--corruptions", default=100, show_default=True, type=click.IntRange(5, 100_000), help="One chunk each.")
@click.option("--size", default=0.1, show_default=True, type=Number(0.05, 16), help="GB of the model.")
def integrity(json_file: Path | None, corruptions: int, size: float) -> None:
    """Damage chunks of a running installation, tier by tier: what was healed, refused, served. Exit 1 where it was not
    as stated.
    """
    try:
        report = integrity_bench.run(integrity_bench.IntegrityPlan(int(size * 1e9), corruptions, _tell))
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    click.echo(integrity_table(report))
    _tell_where(report)
    sys.exit(1 if any(verdict.passed is False for verdict in report.verdicts) else 0)


@main.command("ledger")
@_JSON
@click.option(
    "--requests", default=300_000, show_default=True, type=click.IntRange(1, 100_000_000), help="In one month."
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 1000), help="Reports after the first.")
def ledger(json_file: Path | None, requests: int, repeats: int) -> None:
    """A month of many requests: how fast it enters, is billed, verified and reconciled, in how much memory.

    Takes up to 1.2 kB of disk per request, below $TMPDIR.
    """
    try:
        report = ledger_bench.run(ledger_bench.LedgerPlan(requests, repeats, _tell))
    except (ledger_bench.LedgerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    click.echo(ledger_bench.table(report))
    click.echo(f"machine: {report.machine}  commit: {report.commit}")


@main.command("recovery")
@_JSON
@click.option("--requests", default=20, show_default=True, type=click.IntRange(1, 100_000), help="Before each backup.")
def recovery(json_file: Path | None, requests: int) -> None:
    """Lose the database, then the whole data directory, of an installation of its own; exit 1 where more was lost, or
    it took longer, than the documentation states.
    """
    scratch = Path(tempfile.mkdtemp(prefix="kelvin-drill-"))
    try:
        report = drill(scratch, requests=requests, tell=_tell)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if json_file is not None:
        json_file.write_text(report_json(report))
    click.echo(report_table(report))
    sys.exit(0 if report.passed else 1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(json_file: Path | None, report: msgspec.Struct) -> None:
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _tell_where(
    report: floor_bench.FloorReport | FrontReport | IntegrityReport | LoadReport | Report | StormReport,
) -> None:
    click.echo(f"machine: {report.machine}  load before: {report.load_before:.2f}  commit: {report.commit}")
    for note in report.notes:
        click.echo(f"note: {note}")


def _check_plots(directory: Path | None) -> None:
    if directory is not None:
        try:
            plots_bench.check()
        except plots_bench.NoPlots as error:
            raise click.ClickException(str(error)) from error


def _sizes(words: str, large: bool, need: room.Need) -> list[int]:
    """In bytes; refused where they are none, or where there is no room for the largest."""
    try:
        sizes_bytes = room.sizes_of(words, large=large)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes") from None
    if (why := room.refusal(sizes_bytes, need, _free_disk(), free_memory_bytes())) is not None:
        raise click.ClickException(why)
    return sizes_bytes


def _check_room(disk_bytes: int, memory_bytes: int) -> None:
    if (why := room.shortage(disk_bytes, memory_bytes, _free_disk(), free_memory_bytes())) is not None:
        raise click.ClickException(f"this takes {why}")


def _free_disk() -> int:
    return shutil.disk_usage(tempfile.gettempdir()).free


for _command in traffic.ALL:
    main.add_command(_command)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was made is taken away
    main()
