"""Tables never cut a word, on a narrow terminal or in a pipe."""

import io
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from kelvin.cli.base.api_client import Target
from kelvin.cli.base.tables import print_table
from kelvin.cli.tenants.key_commands import keys_command

KEY = "key_06gvi8bhshcsc57af1k1gbef9o"
HEADERS = ("id", "name", "scopes", "created", "last used")
OTHERS = ("a name of some length", "inference admin billing:read", "2026-11-24 08:00:00", "never")


def _printed(console: Console) -> str:
    table = Table(*HEADERS)
    table.add_row(KEY, *OTHERS)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_terminal_shows_whole_words(width: int) -> None:
    """The id that `keys revoke` needs is shown whole, even if the terminal is narrower than the table."""
    text = _printed(Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None))
    assert KEY in text
    assert "…" not in text


def test_narrow_terminal_shows_a_row_as_a_block() -> None:
    """A row wider than the terminal is printed as a block. A table that fits stays a table."""
    text = _printed(Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None))
    assert max(map(len, text.splitlines())) <= 60
    for header, cell in zip(HEADERS, (KEY, *OTHERS), strict=True):
        assert f"\n{header:11}{cell}\n" in text
    wide = _printed(Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None))
    assert "━" in wide
    assert "━" not in text


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_keys_list_cuts_no_handle(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an 80-column terminal, `kelvin keys list` prints no longer line, and the key id is whole."""
    times = {"created_at_s": 1795834800, "expires_at_s": None, "last_used_at_s": 1795834800}
    row = {"key_id": "di51m6a8wwri", "name": "admin", "state": "active", "scopes": ["admin", "operator"], "models": []}
    answer = httpx.Response(200, json={"keys": [row | times]})
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="https://localhost")
    monkeypatch.setattr(Target, "client", lambda _: client)
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": "1" if terminal else None}
    done = CliRunner(env=environment).invoke(keys_command, ["list"], obj=Target(Path("/nowhere")))
    assert done.exit_code == 0, done.output
    assert "di51m6a8wwri" in done.output
    assert (max(map(len, done.output.splitlines())) <= 80) is terminal


def test_pipe_has_a_row_in_one_line() -> None:
    """`kelvin keys list

    grep NAME` finds the id beside the name, whatever `COLUMNS` says.
    """
    text = _printed(Console(file=io.StringIO(), width=80))
    (row,) = [line for line in text.splitlines() if KEY in line]
    assert all(each in row for each in OTHERS)


@pytest.mark.parametrize("cell", ["gpu[a100]", "[/h100]", "x:gem:"])
def test_cell_is_printed_as_it_is(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Device classes and audit text may contain rich's markup."""
    table = Table("device")
    table.add_row(cell)
    print_table(table)
    assert cell in capsys.readouterr().out
