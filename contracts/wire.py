"""Strict JSON between processes: one way to encode, one way to decode, errors that name the value and the rule."""

from typing import Final, TypeVar

import msgspec

from contracts.errors import InvalidRequest, Refused

T = TypeVar("T")

MAX_RULE: Final = 400  # characters: msgspec repeats the value that it did not expect, however long


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every fact that crosses processes: frozen, keyword-only, unknown fields refused."""


def encode(value: object) -> bytes:
    """UTF-8 JSON."""
    return msgspec.json.encode(value)


def decode(raw: bytes | bytearray | memoryview | str, kind: type[T], *, what: str = "body") -> T:
    """Decode strictly; anything else raises `Refused(InvalidRequest)` naming `what` and msgspec's rule."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(InvalidRequest(what, "(JSON)", str(error)[:MAX_RULE])) from error
