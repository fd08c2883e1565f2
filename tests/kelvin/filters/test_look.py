"""Streamed scanning gives the same text for any pieces, and holds back only undecided text."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kelvin.contracts.artifacts.filter_api import ENTITIES, Action, FilterRule, apply_result
from kelvin.filters.pii import build_finders, scan_text
from kelvin.filters.segmentation_policy import SEGMENT_CHARACTERS_MAX, is_plain, without_invisible

ALL: dict[str, Action] = dict.fromkeys(ENTITIES, "redact")
REDACT = (FilterRule(filter="pii", actions=ALL, phone_regions=("US",)),)
STOP = (FilterRule(filter="pii", actions=ALL | {"CREDIT_CARD": "stop"}),)
FOUND = (
    "4111\u20111111\u20091111\t1111", "4111\u200b1111 11\u206011 1111", "gb29 nwbk 6016 1331 9268 19",
    "４１１１１１１１１１１１１１１１", "4111.1111.1111.1111", "078 05 1121",
    "jo.doe@example.org", "4111 1111 1111 1111", "5500000000000004", "DE89 3704 0044 0532 0130 00", "192.168.0.1",
    "2001:db8::1", "078-05-1121", "+49 30 901820", "(212) 555-0143", "GB29 NWBK 6016 1331 9268 19",
)  # fmt: skip
BETWEEN = (
    "",
    " ",
    "  ",
    "\n",
    ", ",
    "a",
    "THE END",
    "5",
    " 7 ",
    "-",
    "(",
    "@",
    "é",
    "中",
    "x" * 40,
    "a1" * 300,
    "9 " * 600,
)
TEXTS = st.lists(st.sampled_from(FOUND + BETWEEN) | st.text(max_size=5), max_size=10).map("".join)


def streamed(text: str, cuts: Sequence[int], rules: tuple[FilterRule, ...]) -> tuple[str, str | None]:
    """Return the text that passes when it arrives in these pieces, and the entity that stopped it."""
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    output, held = "", ""
    for start, end in zip(bounds, [*bounds[1:], len(text)], strict=True):
        held += text[start:end]
        passed = apply_result(held, scan_text(held, rules, whole=end == len(text) and start == end))
        output, held = output + passed.text, passed.pending_text
        if passed.stopped is not None:
            return output, passed.stopped
    assert held == ""
    return output, None


def whole(text: str, rules: tuple[FilterRule, ...]) -> tuple[str, str | None]:
    passed = apply_result(text, scan_text(text, rules, whole=True))
    return passed.text, passed.stopped


@given(TEXTS, st.lists(st.integers(0, 3000), max_size=30), st.sampled_from([REDACT, STOP]))
@example("a" * (SEGMENT_CHARACTERS_MAX - 3) + "@example.org", [SEGMENT_CHARACTERS_MAX], REDACT)
@example("x" * 5000 + "@example.org 4111 1111 1111 1111", list(range(0, 5000, 7)), REDACT)
def test_pieces_do_not_change_the_text(text: str, cuts: list[int], rules: tuple[FilterRule, ...]) -> None:
    """The result doesn't depend on the cuts, even within an entity."""
    assert streamed(text, cuts, rules) == whole(text, rules)


@given(TEXTS)
def test_single_characters_do_not_change_the_text(text: str) -> None:
    """Pieces of one character give the same result."""
    assert streamed(text, range(len(text)), REDACT) == whole(text, REDACT)


def test_control_pieces_scanned_alone_miss_an_entity() -> None:
    """Negative control: without held-back text, an entity split over two pieces passes."""
    pieces = ("to jo@exam", "ple.org now")
    alone = "".join(whole(piece, REDACT)[0] for piece in pieces)
    assert alone == "".join(pieces)
    assert streamed("".join(pieces), [len(pieces[0])], REDACT) == ("to <EMAIL_ADDRESS> now", None)


def test_segment_limit_splits_no_entity() -> None:
    """An entity at the end of a long segment is found whole, not shortened by the segment's limit."""
    rules = (FilterRule(filter="pii", actions={"EMAIL_ADDRESS": "redact"}),)
    before = ":" * (SEGMENT_CHARACTERS_MAX - len("jo@example.or"))
    assert whole(f"{before}jo@example.org", rules) == (f"{before}<EMAIL_ADDRESS>", None)


@given(st.lists(st.sampled_from((":", "ab", "f", "x", ".", "-", "\u200b")), max_size=24).map("".join))
@example("ab:" * 7 + "ab")
@example("ab:\u200b:f")
def test_plain_segment_holds_nothing(text: str) -> None:
    """A segment that is skipped as plain contains no entity."""
    visible, _ = without_invisible(text)
    assert not is_plain(text) or not any(finder(visible) for finder in build_finders(REDACT[0]))


@pytest.mark.parametrize(
    ("text", "held"),
    [
        pytest.param("The quick brown fox ", "", id="complete words"),
        pytest.param("The quick brown fo", "fo", id="a word that may become an address"),
        pytest.param("It costs 5 ", "5 ", id="a number that may continue"),
        pytest.param("It costs 5\n", "", id="a number that has ended"),
        pytest.param("It costs 5 a", "a", id="a number before a word"),
        pytest.param("谢谢", "", id="letters that can't be in an address"),
        pytest.param("x" * 3000, "x" * 888, id="no more than a segment"),
    ],
)
def test_only_a_possible_match_is_held_back(text: str, held: str) -> None:
    """Only text that may be the beginning of an entity is held back."""
    looked = scan_text(text, REDACT, whole=False)
    assert text[looked.decided :] == held
