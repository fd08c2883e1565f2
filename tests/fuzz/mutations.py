"""Hypothesis strategies that make an invalid input of a valid one, by changing its bytes or its JSON.

Hypothesis makes every choice, so findings shrink to a valid input with the fewest and smallest changes.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

Inputs = Sequence[bytes]
Place = tuple[Any, Any]  # a list or dictionary, and a key or index in it
Change = Callable[[DrawFn, bytes, Inputs], bytes]  # changes an input; parts of the other inputs may be copied into it

MAX_BYTES: Final = 1 << 16  # of one input
NUMBERS: Final = (
    0, 1, -1, 2, 16, 17, 255, 256, 4095, 4096, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 10**18, 10**30, 10**4200,
)  # fmt: skip
TEXTS: Final = (
    "", "a", "a" * 300, "\x00", "\n", "\r\n\r\n", '"', "\\", "../../etc/passwd", "/", ".", "é", "\u2028", "\ud800",
    "💥", "*", "%00", "kv-abcdefghijkl-" + "S" * 43, "9" * 5000, "0x" + "f" * 5000, "1e999", "NaN", "-0", "DEPTH",
)  # fmt: skip
DEPTHS: Final = (70, 900, 3000)
PLACES: Final = 400  # about how many nodes of a tree may be changed

_COUNT: Final = st.sampled_from((1, 1, 2, 4))
_NUMBER: Final = st.sampled_from(NUMBERS)
_STEP: Final = st.sampled_from((-1, 1, 8, -4096, 4096))
_VALUE: Final = (
    _NUMBER
    | st.sampled_from(TEXTS)
    | st.recursive(
        st.none() | st.booleans() | st.floats(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("", "a")), inner, max_size=2),
        max_leaves=3,
    )
)
_KEY: Final = st.sampled_from((*TEXTS[1:8], "type", "name"))
_LENGTH: Final = st.sampled_from((1, 1, 2, 4, 8, 64, MAX_BYTES))
_INSERTED: Final = st.sampled_from((b"\x00", b"\xff" * 4, b"{", b'"', b"\n")) | st.binary(min_size=1, max_size=3)


@st.composite
def changed_sample(draw: DrawFn, change: Change, samples: Inputs, corpus: Inputs) -> bytes:
    """A changed sample, or more rarely a changed corpus input, because those are mostly refused early."""
    inputs = (*samples, *corpus)
    return change(draw, draw(st.sampled_from(inputs if happens(draw, 2) else samples)), inputs)[:MAX_BYTES]


def happens(draw: DrawFn, tenths: int) -> bool:
    """Return True in `tenths` of ten draws. Shrinks to False."""
    return draw(st.integers(0, 9)) >= 10 - tenths


def change_bytes(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    """Make one to four small changes that break parsers: lengths, signs, ends, repetitions."""
    for _ in range(draw(_COUNT)):
        data = draw(_OF_BYTES)(draw, data, inputs)[:MAX_BYTES]
    return data


def change_words(*words: bytes) -> Change:
    """Return a `change_bytes` that also inserts words of the format."""
    word = st.sampled_from(words)

    def change(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
        if happens(draw, 5):
            return change_bytes(draw, data, inputs)
        at, end = _range(draw, data)
        return data[:at] + draw(word) + data[draw(st.sampled_from((at, end))) :]

    return change


def change_json(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    """Mostly change the tree and write it as JSON, canonical or not. Sometimes change the bytes."""
    if happens(draw, 2):
        return change_bytes(draw, data, inputs)
    try:
        tree = json.loads(data)
        other = json.loads(draw(st.sampled_from(inputs)))
    except (ValueError, RecursionError):
        return change_bytes(draw, data, inputs)
    return dumped(draw, change_tree(draw, tree, other))


def change_tree(draw: DrawFn, tree: Any, other: Any) -> Any:
    """Change, move, copy, delete or replace one to four nodes of a JSON tree. Replacements come from `other`."""
    holder = [tree]
    for _ in range(draw(_COUNT)):
        places = _places(holder)
        leaves = [(container, key) for container, key in places if not isinstance(container[key], list | dict)]
        numbers = [(container, key) for container, key in leaves if type(container[key]) in (int, float)]
        match draw(st.integers(0, 2)):
            case 0 if leaves:
                container, key = _any_of(draw, leaves)
                container[key] = draw(_VALUE)
            case 1 if numbers:
                container, key = _any_of(draw, numbers)
                container[key] = draw(_NUMBER) if draw(st.booleans()) else container[key] + draw(_STEP)
            case _:
                _change_structure(draw, holder, *_any_of(draw, places), _places([other]))
    return holder[0]


def _change_structure(draw: DrawFn, holder: list[Any], container: Any, key: Any, others: list[Place]) -> None:
    match draw(st.integers(0, 5)):
        case 0:
            container[key] = draw(_VALUE)
        case 1:
            inside, name = _any_of(draw, others)
            container[key] = inside[name]
        case 2 if container is not holder:
            del container[key]
        case 3 if isinstance(container, list) and len(container) < 64:
            container.insert(draw(st.integers(0, len(container))), container[key])
        case 4 if isinstance(container, dict):
            container[draw(_KEY)] = container[key]
        case _:
            container[key] = [container[key]]


def dumped(draw: DrawFn, tree: Any) -> bytes:
    """Encode as JSON. Half of the results are canonical: keys sorted, no spaces, UTF-8."""
    canonical = draw(st.booleans())
    separators = (",", ":") if canonical else None
    try:
        text = json.dumps(tree, sort_keys=canonical, separators=separators, ensure_ascii=not canonical)
    except (TypeError, ValueError, RecursionError):  # keys that don't compare, integers with too many digits, depth
        return b"{}"
    if '"DEPTH"' in text:
        depth = draw(st.sampled_from(DEPTHS))
        text = text.replace('"DEPTH"', depth * "[" + depth * "]")
    return text.encode("utf-8", "surrogatepass")


def _places(holder: list[Any]) -> list[Place]:
    """Return the first containers and keys of a tree, including its root."""
    places: list[Place] = [(holder, 0)]
    for container, key in places:  # the list grows during the loop
        inner = container[key]
        if isinstance(inner, list | dict) and len(places) < PLACES:
            places += [(inner, each) for each in (inner if isinstance(inner, dict) else range(len(inner)))]
    return places


def _any_of(draw: DrawFn, places: list[Place]) -> Place:
    return places[draw(st.integers(0, len(places) - 1))]


def _at(draw: DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _range(draw: DrawFn, data: bytes) -> tuple[int, int]:
    at = _at(draw, data)
    return at, min(len(data), at + draw(_LENGTH))


def _flip(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    at = _at(draw, data)
    return data[:at] + bytes([byte ^ (1 << draw(st.integers(0, 7))) for byte in data[at : at + 1]]) + data[at + 1 :]


def _delete(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    at, end = _range(draw, data)
    return data[:at] + data[end:]


def _repeat(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    at, end = _range(draw, data)
    return data[:end] + data[at:end] * draw(st.sampled_from((1, 1, 2, 100))) + data[end:]


def _insert(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    at = _at(draw, data)
    return data[:at] + draw(_INSERTED) + data[at:]


def _splice(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    other = draw(st.sampled_from(inputs))
    return data[: _at(draw, data)] + other[_at(draw, other) :]


def _integer(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    """Replace a little-endian number of one to eight bytes by an interesting one or by a near one."""
    width = draw(st.sampled_from((1, 2, 4, 8)))
    at = _at(draw, data)
    before = int.from_bytes(data[at : at + width], "little")
    after = (before + draw(_STEP) if draw(st.booleans()) else draw(_NUMBER)) % (1 << 8 * width)
    return data[:at] + after.to_bytes(width, "little") + data[at + width :]


def _decimal(draw: DrawFn, data: bytes, _: Inputs) -> bytes:
    """Replace a decimal number by another one."""
    if not (numbers := [found.span() for found in re.finditer(rb"[0-9]+", data)]):
        return data
    at, end = draw(st.sampled_from(numbers))
    return data[:at] + str(draw(_NUMBER)).encode() + data[end:]


_OF_BYTES: Final = st.sampled_from((_flip, _delete, _repeat, _insert, _splice, _integer, _integer, _decimal, _decimal))
