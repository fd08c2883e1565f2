"""Read the JSON columns of tenants, models and versions."""

from typing import TypeVar

from contracts.wire import BadJson, decoder

T = TypeVar("T")


class UnreadableColumn(Exception):
    """A column has what this program does not know; the text says which one, and the rule.

    A newer program may have written it: a setting that is added is no step of the schema.
    """


def read_column(stored: str, kind: type[T], what: str) -> T:
    """Return the column's value. Raises UnreadableColumn."""
    try:
        return decoder(kind).decode(stored)
    except BadJson as error:
        raise UnreadableColumn(f"{what} can't be read ({error})") from error
