"""Print JSON and tables. No word in a table is cut, so that ids and names can be pasted into a command."""

import json
from datetime import UTC, datetime
from typing import Final

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED: Final = 1 << 16  # columns


def print_json(value: object) -> None:
    """Print as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def print_table(table: Table, console: Console | None = None) -> None:
    """Print to standard output, or to `console`.

    On a terminal cells are wrapped between words. If the longest words do not fit side by side, each row becomes a
    block with one line per column. In a pipe or a file cells are not wrapped, so that `grep` finds a whole row.
    """
    console = Console(emoji=False) if console is None else console
    options = console.options.update(max_width=_UNBOUNDED, markup=False)
    for column in table.columns:
        cells = (column.header, *column.cells)
        column.min_width = max(Measurement.get(console, options, cell).minimum for cell in cells)
    if not console.is_terminal:
        console.width = console.measure(table, options=options).maximum
    elif console.measure(table, options=options).minimum > console.width:
        _print_blocks(table, console)
        return
    console.print(table, crop=False, markup=False)


def _print_blocks(table: Table, console: Console) -> None:
    headers = [str(column.header) for column in table.columns]
    indent = max(map(len, headers)) + 2
    if table.title:
        console.print(table.title, markup=False, highlight=False)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        console.print()
        for header, cell in zip(headers, row, strict=True):
            console.print(f"{header:{indent}}{cell}".rstrip(), soft_wrap=True, markup=False, highlight=False)


def format_instant(at_s: int | None, never: str = "") -> str:
    """Return seconds since 1970 as UTC to the minute, or `never` for None."""
    return never if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
