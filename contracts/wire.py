"""Strict JSON between processes: one way to encode, one way to decode, errors that name the value and the rule.

Every type is made ready for decoding here, once, and one at a time. msgspec keeps that with the type while it is still
being filled: a thread that decodes the same type at that moment, or one that holds it, ends the process.
"""

from threading import Lock
from typing import Any, Final, TypeVar

import msgspec

from contracts.errors import InvalidRequest, Refused

T = TypeVar("T")

MAX_RULE: Final = 400  # characters: msgspec repeats the value that it did not expect, however long
_building: Final = Lock()
_built: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what crosses processes: frozen, keyword-only, unknown fields refused."""


class Fact(Wire, frozen=True, omit_defaults=True):
    """Base of what goes between processes that may be of different builds while one takes the place of the other.

    A field that is added has a default, and is not said where it has that. So who does not know it yet understands all
    that is said until somebody uses what is new, and refuses that then, in place of doing something else; and what was
    written before there was the field is read for ever.
    """


def encode(value: object) -> bytes:
    """UTF-8 JSON."""
    return msgspec.json.encode(value)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A type's decoder, for any number of threads. What it raises is msgspec's, for the caller to translate."""
    found: msgspec.json.Decoder[T] | None = _built.get(kind)
    if found is None:
        with _building:
            found = _built[kind] = msgspec.json.Decoder(kind)
    return found


def decode(raw: bytes | bytearray | memoryview | str, kind: type[T], *, what: str = "body") -> T:
    """Decode strictly; anything else raises `Refused(InvalidRequest)` naming `what` and msgspec's rule."""
    try:
        return decoder(kind).decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(InvalidRequest(what, "(JSON)", str(error)[:MAX_RULE])) from error


def convert(value: object, kind: type[T]) -> T:
    """Plain objects as a struct. Raises msgspec.ValidationError."""
    decoder(kind)  # makes the type ready
    return msgspec.convert(value, kind)
