"""Tables cut no word, on a narrow terminal and in a pipe."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from kelvin.tables import print_table

KEY = "key_06gvi8bhshcsc57af1k1gbef9o"
OTHERS = ("a name of some length", "inference admin billing:read", "2026-11-24 08:00:00", "never")


def _printed(console: Console) -> str:
    table = Table("id", "name", "scopes", "created", "last used")
    table.add_row(KEY, *OTHERS)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_terminal_shows_whole_words(width: int) -> None:
    """The id that `keys revoke` needs is there, also where the terminal is narrower than the table."""
    text = _printed(Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None))
    assert KEY in text
    assert "…" not in text


def test_pipe_has_a_row_in_one_line() -> None:
    """`kelvin keys list | grep NAME` finds the id beside the name, whatever `COLUMNS` says."""
    text = _printed(Console(file=io.StringIO(), width=80))
    (row,) = [line for line in text.splitlines() if KEY in line]
    assert all(each in row for each in OTHERS)


@pytest.mark.parametrize("cell", ["gpu[a100]", "[/h100]", "x:gem:"])
def test_cell_is_printed_as_it_is(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Device classes and the audit's words may hold what rich takes for its markup."""
    table = Table("device")
    table.add_row(cell)
    print_table(table)
    assert cell in capsys.readouterr().out
