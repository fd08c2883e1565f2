"""Read protobuf's wire format strictly: only the fields that a message may have. Nothing is copied.

A table describes the fields. This reader refuses input that protobuf's own readers accept: unknown fields, groups, a
wire type other than the table's, numbers of more than 64 bits. It also refuses a singular field that occurs twice;
other readers would merge it or let the last one win.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

MOST: Final = 1 << 18  # occurrences of fields without a limit in the table; skipping them takes about a second


class Malformed(ValueError):
    """The bytes are no valid message. The text says what is wrong."""


class WireType(Enum):
    """The encoding of a field's value: protobuf's wire types."""

    VARINT = 0
    FIXED64 = 1
    LENGTH = 2  # text, bytes, messages, packed numbers
    FIXED32 = 5


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message. `is_kept`: its values are kept. Other fields are only counted, and must be well-formed.

    `most` limits its occurrences: a value of two bytes takes a hundred if it is kept, so they are counted first.
    Numbers that are skipped a run at a time are not counted.
    """

    name: str
    form: WireType
    is_repeated: bool = False
    is_kept: bool = True
    most: int = MOST


Table = Mapping[int, Field]
_LONGEST_VARINT: Final = 10


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: the kept values of each field in order, and how often each field occurred."""

    numbers: Mapping[str, list[int]]
    parts: Mapping[str, list[memoryview]]
    counts: Mapping[str, int]

    def number(self, name: str, default: int = 0) -> int:
        """Return a singular number, or `default`."""
        return self.numbers.get(name, [default])[0]

    def part(self, name: str) -> memoryview | None:
        """Return a singular message or bytes, or None."""
        found = self.parts.get(name)
        return found[0] if found else None

    def text(self, name: str) -> str:
        """Return a singular text, "" if it is absent. Raises Malformed."""
        return as_text(self.parts.get(name, [memoryview(b"")])[0])

    def messages(self, name: str) -> list[memoryview]:
        """Return the values of a repeated message."""
        return self.parts.get(name, [])

    def has(self, name: str) -> bool:
        """Return whether the field occurred."""
        return name in self.counts


def as_text(part: memoryview) -> str:
    """Return the text. Raises Malformed if it is not UTF-8."""
    try:
        return str(part, "utf-8")
    except UnicodeDecodeError:
        raise Malformed("a text is not UTF-8") from None


def read_message(data: memoryview, table: Table, what: str) -> Message:
    """Read all of `data` as one message of `table`. `what` names it in errors. Raises Malformed."""
    numbers: dict[str, list[int]] = {}
    parts: dict[str, list[memoryview]] = {}
    counts: dict[str, int] = {}
    at, end = 0, len(data)
    while at < end:
        key_at = at
        key = data[at]  # nearly every key is one byte, and a large model has millions of fields
        if key < 128:
            at += 1
        else:
            key, at = read_varint(data, at, what)
        field = table.get(key >> 3)
        if field is None:
            raise Malformed(f"{what} has a field of number {key >> 3}, which is unknown")
        if key & 7 != field.form.value:
            raise Malformed(f"{what}.{field.name} is written as another type")
        counts[field.name] = counts.get(field.name, 0) + 1
        if counts[field.name] > 1 and not field.is_repeated:
            raise Malformed(f"{what}.{field.name} occurs twice")
        if counts[field.name] > field.most:
            raise Malformed(f"{what}.{field.name} occurs more than {field.most} times")
        start = at
        run = _run_of(key, field.form) if field.is_repeated and not field.is_kept else None
        if run is not None and (found := run.match(data, key_at)) is not None:
            at = found.end()
            continue
        if field.form is WireType.VARINT:
            value, at = read_varint(data, at, what)
            if field.is_kept:
                numbers.setdefault(field.name, []).append(value)
            continue
        if field.form is WireType.LENGTH:
            length, start = read_varint(data, at, what)
            at = start + length
        else:
            at += 4 if field.form is WireType.FIXED32 else 8
        if at > end:
            raise Malformed(f"{what}.{field.name} ends after its message")
        if field.is_kept:
            parts.setdefault(field.name, []).append(data[start:at])
    return Message(numbers, parts, counts)


@cache
def _run_of(key: int, form: WireType) -> re.Pattern[bytes] | None:
    """Return a pattern for a run of small fields with one number. A forest has millions of such nodes, and none is
    kept. The pattern is possessive, so it remembers nothing of each. Numbers of ten bytes are read one by one.
    """
    if key > 127:
        return None
    written = re.escape(bytes([key]))
    match form:
        case WireType.VARINT:
            return re.compile(rb"(?:" + written + rb"[\x80-\xff]{0,8}+[\x00-\x7f])++")
        case WireType.FIXED32:
            return re.compile(rb"(?:" + written + rb"[\x00-\xff]{4})++")
        case _:
            return None


def read_varint(data: memoryview, at: int, what: str) -> tuple[int, int]:
    """Return the number at offset `at`, below 2**64, and the offset after it. Raises Malformed."""
    value = shift = 0
    for place in range(at, min(at + _LONGEST_VARINT, len(data))):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, place + 1
        shift += 7
    raise Malformed(f"{what} holds a number that does not end, or has more than 64 bits")


def signed(value: int) -> int:
    """Return the signed number of an int32 or int64 on the wire."""
    return value - (1 << 64) if value >> 63 else value
