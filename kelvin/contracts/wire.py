"""Strict JSON between processes: one way to encode, one way to decode, errors that name the value and the rule.

All JSON that comes from outside the process is decoded here, whoever wrote it; only the JSON files of a push are read
by `snapshotter/intake/policy/strict_json.py`. Whatever is wrong with it is one error, BadJson, also where it is nested
too deeply.

Every type is made ready for decoding here, once, and one at a time. msgspec attaches its tables to the type before they
are complete. A thread that then decodes this type, or a type that contains it, crashes the process.
"""

import json
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import msgspec

from kelvin.contracts.errors import InvalidRequest, Refused

T = TypeVar("T")

MAX_RULE: Final = 400  # characters: msgspec repeats the value that it did not expect, however long
_build_lock: Final = Lock()
_decoders: Final[dict[Any, "Decoder[Any]"]] = {}


class BadJson(msgspec.DecodeError):
    """Bytes are not JSON, or not of the type that was asked for. The text is the rule, MAX_RULE characters at most."""


class Decoder(Generic[T]):
    """Decodes JSON of one type, for any number of threads. `decoder` makes it."""

    __slots__ = ("_decode",)

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, raw: bytes | bytearray | memoryview | str) -> T:
        """Raises BadJson."""
        try:
            found: T = self._decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadJson(str(error)[:MAX_RULE]) from error
        return found


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


def decoder(kind: type[T]) -> Decoder[T]:
    """Return the type's decoder. It raises BadJson, for the caller to translate."""
    found: Decoder[T] | None = _decoders.get(kind)
    if found is None:
        with _build_lock:
            found = _decoders.get(kind)
            if found is None:
                found = _decoders[kind] = Decoder(kind)
    return found


def decode_any(raw: bytes | bytearray | memoryview | str) -> Any:
    """Decode a JSON value of any type. Raises BadJson."""
    found: Decoder[Any] = decoder(Any)
    return found.decode(raw)


def decode_lenient(raw: bytes | str) -> Any:
    """Decode a JSON value as Python's own module does: files of a model may hold NaN and Infinity. Raises BadJson."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        raise BadJson(str(error)[:MAX_RULE]) from error


def decode(raw: bytes | bytearray | memoryview | str, kind: type[T], *, what: str = "body") -> T:
    """Decode strictly; anything else raises `Refused(InvalidRequest)` naming `what` and msgspec's rule."""
    try:
        found: T = (_decoders.get(kind) or decoder(kind)).decode(raw)
        return found
    except BadJson as error:
        raise Refused(InvalidRequest(what, "(JSON)", str(error))) from error


def convert(value: object, kind: type[T]) -> T:
    """Plain objects as a struct. Raises msgspec.ValidationError."""
    decoder(kind)  # makes the type ready
    return msgspec.convert(value, kind)
