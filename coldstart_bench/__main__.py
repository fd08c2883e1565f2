"""`python -m coldstart_bench`: the benchmarks of `kelvin bench`."""

import sys
from pathlib import Path

import click
import msgspec

from coldstart_bench.cold import Plan, run
from coldstart_bench.rows import table


@click.group()
def main() -> None:
    """Measure Kelvin on this machine."""


@main.command("cold")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
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
    report = run(Plan(sizes_bytes, repeats, lambda line: print(line, file=sys.stderr, flush=True)))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    click.echo(table(report.rows))
    click.echo(f"machine: {report.machine}  commit: {report.commit}")
    for note in report.notes:
        click.echo(f"note: {note}")


if __name__ == "__main__":
    main()
