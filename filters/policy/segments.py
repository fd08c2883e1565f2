"""Cut a folded text (see `folding.py`) into segments, so that no match of a pattern crosses a cut.

A segment is a run of letters, digits and the marks of addresses. A space belongs to it only where a number or an IBAN
may go on behind the space. Each segment is scanned alone, once, after a later character has ended it. So the matches
do not depend on the pieces in which a text comes. Text between segments needs no scan.
"""

import re
from dataclasses import dataclass
from typing import Final

from filters.policy.folding import INVISIBLE

# Longer runs (base64, long lists of numbers) are cut: the end of each part is looked at with the next one.
LIMIT: Final = 1024
LONGEST: Final = 320  # characters that one match may have: an e-mail address (RFC 5321, 4.5.3.1: 64 + 1 + 255)

_WORD: Final = r"0-9A-Za-z\u00c0-\u024f\u0370-\u052f.!#$%&'*+/=?^_`{|}~@:\-()" + INVISIBLE
_SPACES: Final = f"[ {INVISIBLE}]{{1,3}}"
_BEFORE: Final = rf"(?:(?<=[0-9)/\-{INVISIBLE}])|(?<=[A-Z0-9]{{4}}))"
_GOES_ON: Final = rf"{_BEFORE}{_SPACES}(?=[0-9A-Z(+/\-{INVISIBLE}])"
# An IBAN in small letters: behind its country and check digits, and behind a bank of four letters.
_HEAD: Final = "[A-Za-z]{2}[0-9]{2}"
_SMALL: Final = f"(?:(?<={_HEAD})|(?<={_HEAD} [A-Za-z]{{4}})) "
_START: Final = re.compile(f"[{_WORD}]")
_SEGMENT: Final = re.compile(f"[{_WORD}]+(?:(?:{_GOES_ON}|{_SMALL}(?=[0-9A-Za-z]))[{_WORD}]+)*")
_MARKS: Final = re.compile(f"[0-9@]|:[A-Fa-f{INVISIBLE}]*:")
_MAY_GO_ON: Final = re.compile(f"(?:{_BEFORE}{_SPACES}|{_SMALL})?\\Z")


@dataclass(frozen=True, slots=True)
class Segment:
    """`text[start:end]` is to be looked at; what begins in it at `final` or later belongs to the next one."""

    start: int
    end: int
    final: int


def next_segment(text: str, at: int, whole: bool) -> Segment | int:
    """The first one from `at` on; else how far the text is decided without one."""
    begins = _START.search(text, at)
    if begins is None:
        return len(text)
    start = begins.start()
    window = text[start : start + LIMIT]
    found = _SEGMENT.match(window)
    assert found is not None
    may_go_on = _MAY_GO_ON.match(window, found.end()) is not None
    if may_go_on and len(window) == LIMIT:
        return Segment(start, start + LIMIT, start + LIMIT - LONGEST)
    if may_go_on and not whole:
        return start
    return Segment(start, start + found.end(), start + found.end())


def is_plain(text: str) -> bool:
    """Return whether no pattern can match in a segment. It then has no digit, no `@`, and no two colons with only
    hexadecimal letters or invisible characters between them: an IPv6 address may be letters and colons alone.
    """
    return _MARKS.search(text) is None
