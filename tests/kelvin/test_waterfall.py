"""The waterfall shows each stage where it lies."""

from contracts.timeline import Stage, Stamp
from kelvin.timeline import waterfall


def test_each_bar_begins_where_the_one_before_ended() -> None:
    """Bars tile the time since arrival; durations and ends are printed."""
    drawn = waterfall([Stamp(Stage.ROUTED, 1_000), Stamp(Stage.BOUND, 4_000)], width=8)
    first, second = drawn.splitlines()
    assert "│██      │" in first
    assert "│  ██████│" in second
    assert second.endswith("3.0 ms       4.0")


def test_the_floor_is_drawn_beside_it() -> None:
    """A floor longer than the start widens the picture instead of leaving it."""
    drawn = waterfall([Stamp(Stage.ROUTED, 1_000)], floor_us=2_000, width=8)
    assert drawn.splitlines()[-1].lstrip().startswith("floor │░░░░░░░░│")


def test_the_picture_ends_with_the_first_token() -> None:
    """A long answer does not squeeze the start; it is a line of words."""
    drawn = waterfall([Stamp(Stage.FIRST_TOKEN, 1_000), Stamp(Stage.DONE, 901_000)], width=8)
    first, last = drawn.splitlines()
    assert "│████████│" in first
    assert last.split() == ["done", "900.0", "ms", "after", "that"]


def test_no_stamps_are_said_to_be_none() -> None:
    """An empty timeline is a sentence."""
    assert waterfall([]) == "(no stages were stamped)"
