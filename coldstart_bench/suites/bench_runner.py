"""The frame of every bench: options become a plan, a run becomes figures, claims are held against them.

One report as JSON, text and pictures, and one exit code, by `bench_report.py`. Which benches there are is in
`__main__.py`.
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
    """Refuse, before anything is measured, a file whose directory is not there, or can't be written to."""
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
    """Given to every bench beside its options: `tell` prints a line per step, `known` takes the figures so far."""

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
    """Return an option. Its value, as `convert` returns it, becomes the field `into` of the plan. A ValueError of
    `convert` is wrong usage.
    """

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
    """Empty; gone when the block ends, with all that could be removed of it. Below $TMPDIR unless it says where."""
    with tempfile.TemporaryDirectory(prefix="kelvin-bench-", dir=beside, ignore_cleanup_errors=True) as path:
        yield Path(path)


@dataclass(frozen=True, slots=True)
class Bench(Generic[P, F]):
    """A benchmark: options that `plan` takes by name, a run that returns figures, and the claims about them.

    `run` is given an empty directory, which the frame deletes afterwards. It raises BenchFailed. `refusal` is given the
    free bytes of disk and of memory, and returns why the plan does not fit, or None.
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
        click.echo(report.text(self.table(report.figures)))  # first, because writing the file may fail on a full disk
        write(report.figures)
        if pictures is not None and self.draw is not None:
            self.draw(report.figures, pictures)
        sys.exit(0 if report.passed else 1)


def tell(line: str) -> None:
    """Print a step on standard error."""
    print(line, file=sys.stderr, flush=True)
