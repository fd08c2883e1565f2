"""Strict JSON between processes: one encoder, one decoder, and errors that name the value and the rule.

All JSON from outside the process is decoded here. The only exception is the JSON in a push, which
`snapshotter/intake/policy/strict_json.py` decodes. Any fault, deep nesting included, raises BadJson.

`decoder` prepares each type for decoding once, one type at a time. msgspec attaches its tables to a type before they
are complete. A second thread that then decodes this type, or a type that contains it, crashes the process.
"""

import json
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import msgspec

from kelvin.contracts.errors import InvalidRequest, Refused

T = TypeVar("T")

MAX_RULE: Final = 400  # characters: msgspec repeats the unexpected value, however long
_build_lock: Final = Lock()
_decoders: Final[dict[Any, "Decoder[Any]"]] = {}


class BadJson(msgspec.DecodeError):
    """The bytes are not JSON, or not of the expected type. The text is the broken rule, at most MAX_RULE characters."""


class Decoder(Generic[T]):
    """A thread-safe decoder for one type. Get it from `decoder`."""

    __slots__ = ("_decode",)

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, raw: bytes | bytearray | memoryview | str) -> T:
        """Return the decoded value. Raises BadJson."""
        try:
            found: T = self._decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadJson(str(error)[:MAX_RULE]) from error
        return found


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of messages between processes: frozen, keyword-only, unknown fields refused."""


class Fact(Wire, frozen=True, omit_defaults=True):
    """Base of messages between processes that may be of different builds during an upgrade.

    An added field must have a default, and is omitted when it has that value. So an older process understands every
    message until the new field is used. It then refuses the message instead of doing something else. Data that was
    written before the field existed stays readable.
    """


def encode(value: object) -> bytes:
    """Return the value as UTF-8 JSON."""
    return msgspec.json.encode(value)


def decoder(kind: type[T]) -> Decoder[T]:
    """Return the type's decoder. It raises BadJson, which the caller translates."""
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
    """Decode a JSON value as Python's own module does: a model's files may contain NaN and Infinity. Raises BadJson."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        raise BadJson(str(error)[:MAX_RULE]) from error


def decode(raw: bytes | bytearray | memoryview | str, kind: type[T], *, field: str = "body") -> T:
    """Decode strictly. Raises `Refused(InvalidRequest)` with `field` and msgspec's rule."""
    try:
        found: T = (_decoders.get(kind) or decoder(kind)).decode(raw)
        return found
    except BadJson as error:
        raise Refused(InvalidRequest(field, "(JSON)", str(error))) from error


def convert(value: object, kind: type[T]) -> T:
    """Return plain objects as a struct. Raises msgspec.ValidationError."""
    decoder(kind)  # prepares the type
    return msgspec.convert(value, kind)
