"""Print tables without cutting words, so that ids, versions and names can be pasted into the next command."""

from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED: Final = 1 << 16  # columns


def print_table(table: Table, console: Console | None = None) -> None:
    """Print to standard output, or to `console`.

    On a terminal a table is as wide as the terminal, or wider if its longest words need that. In a pipe or a file cells
    are not wrapped, so that `grep` finds a whole row.
    """
    console = Console(emoji=False) if console is None else console
    options = console.options.update(max_width=_UNBOUNDED, markup=False)
    for column in table.columns:
        cells = (column.header, *column.cells)
        column.min_width = max(Measurement.get(console, options, cell).minimum for cell in cells)
    if not console.is_terminal:
        console.width = console.measure(table, options=options).maximum
    console.print(table, crop=False, markup=False)
