"""Read columns that a newer program may have written differently: JSON objects, and enums with more words."""

from enum import StrEnum
from typing import TypeVar

from kelvin.contracts.wire import BadJson, decoder

T = TypeVar("T")
W = TypeVar("W", bound=StrEnum)


class UnreadableColumn(Exception):
    """A column has a value that this program does not know. The text names the column and the rule.

    A newer program may have written it: a new setting or word is not a step of the schema.
    """


def read_column(stored: str, kind: type[T], what: str) -> T:
    """Return the column's decoded value. Raises UnreadableColumn."""
    try:
        return decoder(kind).decode(stored)
    except BadJson as error:
        raise UnreadableColumn(f"{what} can't be read ({error})") from error


def read_enum(stored: str, words: type[W], what: str) -> W:
    """Return the column's word as an enum member. Raises UnreadableColumn."""
    try:
        return words(stored)
    except ValueError as error:
        raise UnreadableColumn(f"{what} can't be read ({error})") from error
