"""Prepare a text for scanning and merge the findings: fold characters, cut segments, join spans. Pure.

Folding maps look-alike characters to ASCII, so that patterns match them: hyphens, spaces, digits, full-width letters.
Each character becomes exactly one character, so offsets in the folded text are offsets in the original.

A segment is a run of letters, digits and the punctuation of addresses. It includes a space only if a number or an IBAN
may continue after it. No match crosses a cut: each segment is scanned alone, once, after a later character has ended
it. So matches do not depend on the pieces in which a text arrives. Text between segments needs no scan.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.artifacts.filter_api import EntitySpan

INVISIBLE: Final = "\u200b"  # every zero-width character becomes this one, which `without_invisible` removes
_HYPHENS: Final = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_SPACES: Final = "\t\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# Unicode's Default_Ignorable_Code_Point, as ranges of first and last (DerivedCoreProperties.txt).
_IGNORABLE: Final = (
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200C, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
_ZERO_WIDTH: Final = "".join(chr(point) for first, last in _IGNORABLE for point in range(first, last + 1))
_FULL_WIDTH: Final = range(0xFF01, 0xFF5F)  # forms of ASCII 0x21 to 0x7e


class _Folded(dict[int, int]):
    """Folded code points by code point. Missing ones are computed once."""

    def __missing__(self, point: int) -> int:
        digit = unicodedata.decimal(chr(point), None)
        folded = point if digit is None else ord("0") + digit
        if point in _FULL_WIDTH:
            folded = point - 0xFEE0
        self[point] = folded
        return folded


_FOLDED: Final = _Folded(
    {
        ord(each): ord(to)
        for written, to in ((_HYPHENS, "-"), (_SPACES, " "), (_ZERO_WIDTH, INVISIBLE))
        for each in written
    }
)


def fold(text: str) -> str:
    """Return the folded text, of the same length."""
    return text if text.isascii() and "\t" not in text else text.translate(_FOLDED)


def without_invisible(folded: str) -> tuple[str, list[int] | None]:
    """Return a folded text without INVISIBLE, and the original offset of each character (None: nothing was removed)."""
    if INVISIBLE not in folded:
        return folded, None
    places = [at for at, character in enumerate(folded) if character != INVISIBLE]
    return "".join(folded[at] for at in places), places


# Longer runs (base64, long lists of numbers) are cut. The end of each part is scanned again with the next one.
SEGMENT_CHARACTERS_MAX: Final = 1024
# Length of the longest valid match, an e-mail address (RFC 5321, 4.5.3.1: 64 + 1 + 255). A longer one may be cut.
MATCH_CHARACTERS_MAX: Final = 320

_WORD_CHARACTERS: Final = r"0-9A-Za-z\u00c0-\u024f\u0370-\u052f.!#$%&'*+/=?^_`{|}~@:\-()" + INVISIBLE
_GAP: Final = f"[ {INVISIBLE}]{{1,3}}"
_GAP_PREFIX: Final = rf"(?:(?<=[0-9)/\-{INVISIBLE}])|(?<=[A-Z0-9]{{4}}))"
_CONTINUATION: Final = rf"{_GAP_PREFIX}{_GAP}(?=[0-9A-Z(+/\-{INVISIBLE}])"
# An IBAN in lower case: after its country and check digits, and after a bank code of four letters.
_HEAD: Final = "[A-Za-z]{2}[0-9]{2}"
_SMALL: Final = f"(?:(?<={_HEAD})|(?<={_HEAD} [A-Za-z]{{4}})) "
_START: Final = re.compile(f"[{_WORD_CHARACTERS}]")
_SEGMENT: Final = re.compile(
    f"[{_WORD_CHARACTERS}]+(?:(?:{_CONTINUATION}|{_SMALL}(?=[0-9A-Za-z]))[{_WORD_CHARACTERS}]+)*"
)
_MARKS: Final = re.compile(f"[0-9@]|:[A-Fa-f{INVISIBLE}]*:")
_MAY_CONTINUE: Final = re.compile(f"(?:{_GAP_PREFIX}{_GAP}|{_SMALL})?\\Z")


@dataclass(frozen=True, slots=True)
class Segment:
    """The range `text[start:end]` to scan. Matches that begin at `final` or later belong to the next segment."""

    start: int
    end: int
    final: int


def next_segment(text: str, at: int, whole: bool) -> Segment | int:
    """Return the first segment from `at` on. If there is none yet, return up to which offset the text is decided."""
    begins = _START.search(text, at)
    if begins is None:
        return len(text)
    start = begins.start()
    window = text[start : start + SEGMENT_CHARACTERS_MAX]
    found = _SEGMENT.match(window)
    assert found is not None
    may_go_on = _MAY_CONTINUE.match(window, found.end()) is not None
    if may_go_on and len(window) == SEGMENT_CHARACTERS_MAX:
        return Segment(start, start + SEGMENT_CHARACTERS_MAX, start + SEGMENT_CHARACTERS_MAX - MATCH_CHARACTERS_MAX)
    if may_go_on and not whole:
        return start
    return Segment(start, start + found.end(), start + found.end())


def is_plain(text: str) -> bool:
    """Return whether no pattern can match in a segment: it has no digit, no `@`, and no possible IPv6 address.

    An IPv6 address may consist of letters and colons alone. So two colons with only hexadecimal letters or invisible
    characters between them count as possible.
    """
    return _MARKS.search(text) is None


def merge_spans(spans: Iterable[EntitySpan]) -> list[EntitySpan]:
    """Return the spans in order, with overlapping ones joined. The result ends with the first span that stops. A joined
    span has the label of the longest of its spans. If one of them stops, it stops, and has that one's label.
    """
    settled: list[EntitySpan] = []
    longest = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.end, span.action != "stop")):
        if settled and span.start < settled[-1].end:
            settled[-1], longest = _joined(settled[-1], span, longest)
            continue
        if settled and settled[-1].action == "stop":
            break
        settled.append(span)
        longest = span.end - span.start
    return settled


def _joined(one: EntitySpan, other: EntitySpan, longest: int) -> tuple[EntitySpan, int]:
    length = other.end - other.start
    stops = "stop" in (one.action, other.action)
    if one.action != other.action:
        label = one.label if one.action == "stop" else other.label
    else:
        label = other.label if length > longest else one.label
    return EntitySpan(
        start=one.start, end=max(one.end, other.end), label=label, action="stop" if stops else "redact"
    ), max(longest, length)
