"""The table of capabilities: its tests exist, its page is up to date, and each claim of the README is a row."""

import re
from typing import Final

import pytest

from tests.consistency.capabilities import PAGE, ROOT, TABLE, capabilities, not_shown, page, sentences, unknown_tests

ROWS: Final = capabilities(TABLE.read_text())
GOOD: Final = """
[[capability]]
ids = ["A1", "B2"]
says = "It works."
shown_by = ["tests/consistency/test_capabilities.py::test_tests_exist"]
shown_on = "real"
"""


def _what_there_is() -> str:
    return re.split(r"^## ", (ROOT / "README.md").read_text().partition("\n## What there is\n")[2], flags=re.M)[0]


def _without_a_row(section: str) -> list[str]:
    says = {row.says for row in ROWS}
    return [sentence for sentence in sentences(section) if sentence not in says]


def test_tests_exist() -> None:
    assert unknown_tests(ROWS) == []


def test_each_is_said_once() -> None:
    says = [row.says for row in ROWS]
    assert sorted(set(says)) == sorted(says)


def test_the_page_is_up_to_date() -> None:
    """The page is what `python -m tests.consistency.capabilities` writes."""
    assert PAGE.read_text() == page(ROWS)


def test_the_readme_says_nothing_beside_it() -> None:
    """Each sentence of the README's section "What there is" is a row."""
    found = list(sentences(_what_there_is()))
    assert len(found) > 10
    assert _without_a_row(_what_there_is()) == []


def test_what_is_wrong_is_found() -> None:
    """Negative controls: a missing test, a sentence without a row, a stale page and a red test are found."""
    (row,) = capabilities(GOOD)
    assert unknown_tests([row]) == []
    assert unknown_tests(capabilities(GOOD.replace("test_tests_exist", "test_nobody_wrote"))) != []
    assert page([row]) != page(capabilities(GOOD.replace("works", "flies")))
    assert not_shown([row], {f"{row.shown_by[0]}[a-b]", "tests/x.py::test_y"}) == ["A1 B2: It works."]
    assert not_shown([row], {"tests/x.py::test_y"}) == []
    assert _without_a_row("- **Door**: Kelvin flies. It swims ([note](docs/x.md)).\n") == ["Kelvin flies.", "It swims."]


@pytest.mark.parametrize("wrong", ['shown_on = "paper"', "", 'shown_on = "real"\nwhy = "x"'])
def test_rows_have_their_keys(wrong: str) -> None:
    """A row with wrong keys or values is refused, and its ids are named."""
    with pytest.raises(ValueError, match="A1"):
        capabilities(GOOD.replace('shown_on = "real"', wrong))
