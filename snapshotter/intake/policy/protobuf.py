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

MAX_COUNT: Final = 1 << 18  # occurrences of fields without a limit in the table; skipping them takes about a second


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

    `max_count` limits its occurrences: a value of two bytes takes a hundred if it is kept, so they are counted first.
    Numbers that are skipped a run at a time are not counted.
    """

    name: str
    wire_type: WireType
    is_repeated: bool = False
    is_kept: bool = True
    max_count: int = MAX_COUNT


Table = Mapping[int, Field]
_MAX_VARINT_BYTES: Final = 10


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


def read_message(data: memoryview, table: Table, message_name: str) -> Message:
    """Read all of `data` as one message of `table`. `message_name` names it in errors. Raises Malformed."""
    numbers: dict[str, list[int]] = {}
    parts: dict[str, list[memoryview]] = {}
    counts: dict[str, int] = {}
    offset, end = 0, len(data)
    while offset < end:
        key_offset = offset
        key = data[offset]  # nearly every key is one byte, and a large model has millions of fields
        if key < 128:
            offset += 1
        else:
            key, offset = read_varint(data, offset, message_name)
        field = table.get(key >> 3)
        if field is None:
            raise Malformed(f"{message_name} has a field of number {key >> 3}, which is unknown")
        if key & 7 != field.wire_type.value:
            raise Malformed(f"{message_name}.{field.name} is written as another type")
        counts[field.name] = counts.get(field.name, 0) + 1
        if counts[field.name] > 1 and not field.is_repeated:
            raise Malformed(f"{message_name}.{field.name} occurs twice")
        if counts[field.name] > field.max_count:
            raise Malformed(f"{message_name}.{field.name} occurs more than {field.max_count} times")
        start = offset
        run = _pattern_of_run(key, field.wire_type) if field.is_repeated and not field.is_kept else None
        if run is not None and (found := run.match(data, key_offset)) is not None:
            offset = found.end()
            continue
        if field.wire_type is WireType.VARINT:
            value, offset = read_varint(data, offset, message_name)
            if field.is_kept:
                numbers.setdefault(field.name, []).append(value)
            continue
        if field.wire_type is WireType.LENGTH:
            length, start = read_varint(data, offset, message_name)
            offset = start + length
        else:
            offset += 4 if field.wire_type is WireType.FIXED32 else 8
        if offset > end:
            raise Malformed(f"{message_name}.{field.name} ends after its message")
        if field.is_kept:
            parts.setdefault(field.name, []).append(data[start:offset])
    return Message(numbers, parts, counts)


@cache
def _pattern_of_run(key: int, wire_type: WireType) -> re.Pattern[bytes] | None:
    """Return a pattern for a run of small fields with one number. A forest has millions of such nodes, and none is
    kept. The pattern is possessive, so it remembers nothing of each. Numbers of ten bytes are read one by one.
    """
    if key > 127:
        return None
    key_pattern = re.escape(bytes([key]))
    match wire_type:
        case WireType.VARINT:
            return re.compile(rb"(?:" + key_pattern + rb"[\x80-\xff]{0,8}+[\x00-\x7f])++")
        case WireType.FIXED32:
            return re.compile(rb"(?:" + key_pattern + rb"[\x00-\xff]{4})++")
        case _:
            return None


def read_varint(data: memoryview, offset: int, message_name: str) -> tuple[int, int]:
    """Return the number at `offset`, below 2**64, and the offset after it. Raises Malformed."""
    value = shift = 0
    for position in range(offset, min(offset + _MAX_VARINT_BYTES, len(data))):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, position + 1
        shift += 7
    raise Malformed(f"{message_name} holds a number that does not end, or has more than 64 bits")


def signed(value: int) -> int:
    """Return the signed number of an int32 or int64 on the wire."""
    return value - (1 << 64) if value >> 63 else value
