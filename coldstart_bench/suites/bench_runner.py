"""The frame of every bench: options become a plan, a run returns figures, and claims are checked against them.

It writes one report (`bench_report.py`) as JSON, text and plots, and sets the exit code. `__main__.py` lists the
benches.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import click

from coldstart_bench.harness.capacity_check import LARGE_BYTES, parse_sizes
from coldstart_bench.harness.machine_state import describe_machine, free_memory_bytes, load_1m, source_commit
from coldstart_bench.report import plots
from coldstart_bench.report.bench_report import BenchFailed, BenchReport, ClaimVerdict, Figures


def _check_writable(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file in a missing or unwritable directory, before anything is measured."""
    if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{file}: must be in a directory that can be written to", ctx, param)
    return file


_JSON: Final = click.Option(
    ["--json", "json_file"],
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_check_writable,
    help="Also write the report here.",
)
_PLOTS: Final = click.Option(
    ["--plots", "pictures"],
    type=click.Path(path_type=Path, file_okay=False),
    help="Also draw the report into this directory (PNG).",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Fields of every plan: `tell` prints a line per step, `known` receives the figures so far."""

    tell: Callable[[str], None]
    known: Callable[[Any], object] = lambda figures: None


P = TypeVar("P", bound=BenchPlan)
F = TypeVar("F", bound=Figures)


def option(
    name: str,
    default: Any,
    kind: Any,
    what: str,
    into: str | None = None,
    *,
    convert: Callable[[Any], object] = lambda value: value,
) -> click.Option:
    """Return an option. Its converted value is the plan's field `into`. A ValueError of `convert` is a usage error."""

    def converted(ctx: click.Context, param: click.Parameter, value: Any) -> object:
        try:
            return convert(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    names = [name] if into is None else [name, into]
    return click.Option(names, default=default, show_default=default != "", type=kind, help=what, callback=converted)


SIZES: Final = (
    option("--sizes", "0.1,0.5,2", str, "Model sizes in GB, separated by commas.", "sizes_bytes", convert=parse_sizes),
    click.Option(["--large"], is_flag=True, help="Sizes up to 16 GB as well."),
)


def with_sizes(plan: Callable[..., P]) -> Callable[..., P]:
    """Return a constructor of the plan that takes the options `SIZES`."""

    def construct(sizes_bytes: Sequence[int], *, large: bool, **options: Any) -> P:
        return plan(sorted({*sizes_bytes, *(LARGE_BYTES if large else ())}), **options)

    return construct


@contextmanager
def scratch_directory(beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty directory, below $TMPDIR by default. It is removed afterwards as far as possible."""
    with tempfile.TemporaryDirectory(prefix="kelvin-bench-", dir=beside, ignore_cleanup_errors=True) as path:
        yield Path(path)


@dataclass(frozen=True, slots=True)
class Bench(Generic[P, F]):
    """A bench: options that `plan` takes by name, a run that returns figures, and claims about them.

    `run` gets an empty directory, which is deleted afterwards, and raises BenchFailed. `refusal` gets the free bytes of
    disk and memory, and returns why the plan does not fit, or None.
    """

    name: str
    what: str
    options: Sequence[click.Parameter]
    plan: Callable[..., P]
    run: Callable[[P, Path], F]
    table: Callable[[F], str]
    claims: Callable[[F], tuple[ClaimVerdict, ...]] = lambda figures: ()
    refusal: Callable[[P, int, int], str | None] = lambda plan, disk_bytes, memory_bytes: None
    draw: Callable[[F, Path], object] | None = None

    def command(self) -> click.Command:
        """Return the command. It exits with 0 if the report passed, else with 1."""
        params = [_JSON, *([] if self.draw is None else [_PLOTS]), *self.options]
        return click.Command(self.name, params=params, callback=self._main, help=self.what)

    def _main(self, json_file: Path | None, pictures: Path | None = None, **options: Any) -> None:
        load_before = load_1m()

        def judged(figures: F) -> BenchReport[F]:
            return BenchReport(figures, self.claims(figures), describe_machine(), load_before, source_commit())

        def write(figures: F) -> None:
            if json_file is not None:
                json_file.write_bytes(judged(figures).json())

        try:
            if pictures is not None:
                plots.check()
            plan = self.plan(**options, tell=tell, known=write)
            free_disk = shutil.disk_usage(tempfile.gettempdir()).free
            if (why := self.refusal(plan, free_disk, free_memory_bytes())) is not None:
                raise BenchFailed(why)
            with scratch_directory() as scratch:
                report = judged(self.run(plan, scratch))
        except BenchFailed as failed:
            raise click.ClickException(str(failed)) from failed
        click.echo(report.text(self.table(report.figures)))  # print first: writing the file may fail on a full disk
        write(report.figures)
        if pictures is not None and self.draw is not None:
            self.draw(report.figures, pictures)
        sys.exit(0 if report.passed else 1)


def tell(line: str) -> None:
    """Print a step to standard error."""
    print(line, file=sys.stderr, flush=True)
