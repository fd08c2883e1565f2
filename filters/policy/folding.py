"""Fold look-alike characters to ASCII, so that patterns match them: hyphens, spaces, digits, full-width letters. Pure.

Each character becomes exactly one character, so offsets in the folded text are offsets in the original.
"""

import unicodedata
from typing import Final

INVISIBLE: Final = "\u200b"  # every zero-width character becomes this one, which `without_invisible` removes
_HYPHENS: Final = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_SPACES: Final = "\t\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_ZERO_WIDTH: Final = "\u00ad\u180e\u200c\u200d\u200e\u200f\u2060\ufeff" + "".join(
    map(chr, (*range(0x202A, 0x202F), *range(0x2061, 0x2070)))
)
_FULL_WIDTH: Final = range(0xFF01, 0xFF5F)  # of ASCII's 0x21 to 0x7e


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
