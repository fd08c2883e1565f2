"""`python -m coldstart_bench`: the benchmarks of `kelvin bench`."""

import shutil
import sys
import tempfile
from pathlib import Path

import click
import msgspec

from coldstart_bench import cold as cold_bench
from coldstart_bench import contenders, room
from coldstart_bench import floors as floor_bench
from coldstart_bench import ledger as ledger_bench
from coldstart_bench import load as load_bench
from coldstart_bench.environment import free_memory_bytes
from coldstart_bench.installation import InstallationFailed
from coldstart_bench.load_rows import LoadReport
from coldstart_bench.load_rows import table as load_table
from coldstart_bench.peers import PeerFailed
from coldstart_bench.recovery import drill
from coldstart_bench.recovery_report import report_json
from coldstart_bench.recovery_report import table as report_table
from coldstart_bench.rows import table

_JSON = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
_LARGE = click.option("--large", is_flag=True, help="Sizes up to 16 GB as well.")


@click.group()
def main() -> None:
    """Measure Kelvin on this machine."""


@main.command("floor")
@_JSON
@click.option("--size", default=1.0, show_default=True, type=click.FloatRange(0.001, 1000), help="GB, without FILES.")
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
@_LARGE
@click.option("--sizes", default="0.1,0.5,2", show_default=True, help="Model sizes in GB, separated by commas.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 1000), help="Rounds per size.")
@click.option("--loaders", default="", help="Only these, separated by commas. [default: all]")
@click.option("--device", default="cpu", show_default=True, help="Where tensors have to be: cpu, cuda or cuda:N.")
def load(json_file: Path | None, large: bool, sizes: str, repeats: int, loaders: str, device: str) -> None:
    """From a disk or from memory until every byte was read: ours, and the loaders that a user would pick instead.

    Whoever is not installed, fails, or gives other bytes is printed.
    """
    try:
        sizes_bytes = room.sizes_of(sizes, large=large)
        who = contenders.chosen([name for name in loaders.split(",") if name])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _refuse_without_room(sizes_bytes, load_bench.NEED)
    try:
        report = load_bench.run(load_bench.LoadPlan(sizes_bytes, repeats, who, device, _tell))
    except (PeerFailed, InstallationFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _write(json_file, report)
    click.echo(load_table(report))
    _tell_where(report)
    sys.exit(1 if any(failed.size_bytes is not None for failed in report.failures) else 0)


@main.command("cold")
@_JSON
@click.option("--sizes", default="0.1,0.5,2", show_default=True, help="Model sizes in GB, separated by commas.")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds per size.")
def cold(json_file: Path | None, sizes: str, repeats: int) -> None:
    """First token from zero, by tier, beside the floor and what a user would pick instead."""
    try:
        sizes_bytes = [int(float(size) * 1e9) for size in sizes.split(",")]
    except ValueError:
        raise click.BadParameter(f"{sizes}: must be numbers of GB separated by commas", param_hint="--sizes") from None
    if any(size < 50_000_000 for size in sizes_bytes):
        raise click.BadParameter(f"{sizes}: each must be 0.05 or more", param_hint="--sizes")
    report = cold_bench.run(cold_bench.Plan(sizes_bytes, repeats, _tell))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    click.echo(table(report.rows))
    click.echo(f"machine: {report.machine}  commit: {report.commit}")
    for note in report.notes:
        click.echo(f"note: {note}")


@main.command("ledger")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
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
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
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


def _tell_where(report: floor_bench.FloorReport | LoadReport) -> None:
    click.echo(f"machine: {report.machine}  load before: {report.load_before:.2f}  commit: {report.commit}")
    for note in report.notes:
        click.echo(f"note: {note}")


def _refuse_without_room(sizes_bytes: list[int], need: room.Need) -> None:
    free_disk = shutil.disk_usage(tempfile.gettempdir()).free
    if (why := room.refusal(sizes_bytes, need, free_disk, free_memory_bytes())) is not None:
        raise click.ClickException(why)


if __name__ == "__main__":
    main()
