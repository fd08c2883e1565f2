"""Read columns that a newer program may have written otherwise: JSON, and words of which there may be more."""

from enum import StrEnum
from typing import TypeVar

from kelvin.contracts.wire import BadJson, decoder

T = TypeVar("T")
W = TypeVar("W", bound=StrEnum)


class UnreadableColumn(Exception):
    """A column has what this program does not know; the text says which one, and the rule.

    A newer program may have written it: a setting or a word that is added is no step of the schema.
    """


def read_column(stored: str, kind: type[T], what: str) -> T:
    """Return the column's value. Raises UnreadableColumn."""
    try:
        return decoder(kind).decode(stored)
    except BadJson as error:
        raise UnreadableColumn(f"{what} can't be read ({error})") from error


def read_enum(stored: str, words: type[W], what: str) -> W:
    """Return the word of these that the column has. Raises UnreadableColumn."""
    try:
        return words(stored)
    except ValueError as error:
        raise UnreadableColumn(f"{what} can't be read ({error})") from error
