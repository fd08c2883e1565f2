"""Read untrusted JSON: one object, UTF-8, no duplicate keys, limited depth. Callers interpret it."""

import json
import re
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused

JsonObject = dict[str, object]
MAX_COUNT: Final = (1 << 63) - 1
MAX_DEPTH: Final = 64  # far above any real file, and far below the limits of libraries that read it later
# Memory for the objects of a file, estimated before parsing. The largest tokenizers in use need half of it.
MAX_PARSED_BYTES: Final = 400 << 20
_MEMBER, _CONTAINER, _VALUE = 250, 80, 70  # bytes of each in CPython 3.11, while an object is built
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_DEPTH_RULE: Final = f"it is nested more than {MAX_DEPTH} deep"


class _DuplicateKey(ValueError):
    """A key occurs twice in one object, so readers would disagree on its value."""

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
    """Return the JSON object in `raw`. Raises `Refused(ArtifactRejected)` with `path` and the reason."""
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
    except ValueError as error:  # also the error of int() for thousands of digits
        raise Refused(ArtifactRejected(path, f"it is not valid JSON: {error}")) from None
    if not isinstance(found, dict):
        raise Refused(ArtifactRejected(path, "it is not a JSON object"))
    if _is_deep(found):
        raise Refused(ArtifactRejected(path, _DEPTH_RULE))
    if _ESCAPED_SURROGATE.search(text) and _has_half_character(found):
        raise Refused(ArtifactRejected(path, "it has half of a surrogate pair, which is no character"))
    return found


def _parsed_bytes(raw: bytes | memoryview) -> int:
    """Estimate the memory of a file's values by its punctuation. Punctuation in texts counts, too."""
    data = bytes(raw)
    containers = data.count(b"[") + data.count(b"{")
    return _MEMBER * data.count(b":") + _CONTAINER * containers + _VALUE * data.count(b",") + len(data)


def _has_half_character(found: JsonObject) -> bool:
    """Return whether an escape names half a surrogate pair, which UTF-8 can't hold. Later readers would differ."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_deep(found: JsonObject) -> bool:
    """Return whether it is nested too deeply. Works level by level, without recursion."""
    level: list[JsonObject | list[object]] = [found]
    for _ in range(MAX_DEPTH):
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


def is_text(value: str) -> bool:
    """Return whether `value` can be encoded as UTF-8. JSON escapes can contain half a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_count(value: object) -> int | None:
    """Return a whole number from 0 to the largest file offset; None for booleans, floats and anything else."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None
