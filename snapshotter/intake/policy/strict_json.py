"""Read JSON that strangers wrote: one object, UTF-8, no key twice, not too deep. What it means is the caller's."""

import json
import re
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused

JsonObject = dict[str, object]
MAX_COUNT: Final = (1 << 63) - 1
MAX_DEPTH: Final = 64  # far above any real file, and far below what the libraries that read it later can bear
# What the objects of a file may take, estimated before any is made. The largest tokenizers that are in use take half.
MAX_PARSED_BYTES: Final = 400 << 20
_MEMBER, _CONTAINER, _VALUE = 250, 80, 70  # bytes of each in CPython 3.11, while an object is being made
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_DEPTH_RULE: Final = f"it is nested more than {MAX_DEPTH} deep"


class _DuplicateKey(ValueError):
    """A key occurs twice in one object: readers would disagree on which value holds."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:80]!r} occurs twice")


def _reject_duplicates(pairs: list[tuple[str, object]]) -> JsonObject:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return found


def parse_object(raw: bytes | memoryview, path: str) -> JsonObject:
    """The JSON object in `raw`. Raises `Refused(ArtifactRejected)` naming `path` and the reason."""
    if (needed := _parsed_bytes(raw)) > MAX_PARSED_BYTES:
        rule = f"its values would take some {needed >> 20} MiB of memory; the limit is {MAX_PARSED_BYTES >> 20} MiB"
        raise Refused(ArtifactRejected(path, rule))
    try:
        text = str(raw, "utf-8")
        found = json.loads(text, object_pairs_hook=_reject_duplicates)
    except UnicodeDecodeError as error:
        raise Refused(ArtifactRejected(path, f"it is not UTF-8 (byte {error.start})")) from None
    except RecursionError:
        raise Refused(ArtifactRejected(path, _DEPTH_RULE)) from None
    except ValueError as error:  # also what int() says of thousands of digits
        raise Refused(ArtifactRejected(path, f"it is not valid JSON: {error}")) from None
    if not isinstance(found, dict):
        raise Refused(ArtifactRejected(path, "it is not a JSON object"))
    if _is_deep(found):
        raise Refused(ArtifactRejected(path, _DEPTH_RULE))
    if _ESCAPED_SURROGATE.search(text) and _has_half_character(found):
        raise Refused(ArtifactRejected(path, "it has half of a surrogate pair, which is no character"))
    return found


def _parsed_bytes(raw: bytes | memoryview) -> int:
    """About what the values of a file take, by its punctuation. What stands in texts counts, too."""
    data = bytes(raw)
    containers = data.count(b"[") + data.count(b"{")
    return _MEMBER * data.count(b":") + _CONTAINER * containers + _VALUE * data.count(b",") + len(data)


def _has_half_character(found: JsonObject) -> bool:
    """Escapes can name what UTF-8 can't hold: readers after this one would disagree on it, or fail."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_deep(found: JsonObject) -> bool:
    """Level by level: nothing here recurses."""
    level: list[JsonObject | list[object]] = [found]
    for _ in range(MAX_DEPTH):
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


def is_text(value: str) -> bool:
    """Whether `value` can be written as UTF-8: JSON escapes can smuggle in half a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_count(value: object) -> int | None:
    """A whole number from 0 to what a file's offset can be; booleans, floats and the rest are None."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None
