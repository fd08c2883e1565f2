"""Make a wrong input of a right one: bytes of any kind, and JSON as a tree, so that it stays JSON."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

Pool = Sequence[bytes]
Mutation = Callable[[Random, bytes, Pool], bytes]

MAX_BYTES: Final = 1 << 16  # of an input
NUMBERS: Final = (
    0, 1, -1, 2, 16, 17, 255, 256, 4095, 4096, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 10**18, 10**30, 10**4200,
)  # fmt: skip
TEXTS: Final = (
    "", "a", "a" * 300, "\x00", "\n", "\r\n\r\n", '"', "\\", "../../etc/passwd", "/", ".", "é", "\u2028", "\ud800",
    "💥", "*", "%00", "kv-abcdefghijkl-" + "S" * 43, "9" * 5000, "0x" + "f" * 5000, "1e999", "NaN", "-0",
)  # fmt: skip
SHALLOW: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    {"": {}},
)
DEPTHS: Final = (70, 900, 3000)


def mutate_bytes(random: Random, data: bytes, pool: Pool) -> bytes:
    """One to four small changes, of the kinds that break parsers: lengths, signs, ends, repetitions."""
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_OF_BYTES)(random, data, pool)[:MAX_BYTES]
    return data


def mutate_words(*words: bytes) -> Mutation:
    """Likewise, with words of the format in between."""

    def mutate(random: Random, data: bytes, pool: Pool) -> bytes:
        if random.random() < 0.5:
            return mutate_bytes(random, data, pool)
        at, end = _range(random, data)
        return (data[:at] + random.choice(words) + data[random.choice((at, end)) :])[:MAX_BYTES]

    return mutate


def mutate_json(random: Random, data: bytes, pool: Pool) -> bytes:
    """Mostly a change of the tree, written canonically or not; sometimes a change of its bytes."""
    if random.random() < 0.2:
        return mutate_bytes(random, data, pool)
    try:
        tree = json.loads(data)
        other = json.loads(random.choice(pool))
    except (ValueError, RecursionError):
        return mutate_bytes(random, data, pool)
    return dumped(random, mutate_tree(random, tree, other))


def mutate_tree(random: Random, tree: Any, other: Any) -> Any:
    """One to four nodes of a tree that `json` read are changed, moved, doubled, taken out, or come from another one."""
    holder = [tree]
    for _ in range(random.choice((1, 1, 2, 4))):
        container, key = random.choice(_places(holder))
        match random.randrange(7):
            case 0 | 1:
                container[key] = _value(random)
            case 2:
                container[key] = _number_near(random, container[key])
            case 3:
                inside, name = random.choice(_places([other]))
                container[key] = inside[name]
            case 4 if container is not holder:
                del container[key]
            case 5 if isinstance(container, list) and len(container) < 64:
                container.insert(random.randrange(len(container) + 1), container[key])
            case 6 if isinstance(container, dict):
                container[random.choice((*TEXTS[1:8], "type", "name"))] = container[key]
            case _:
                container[key] = [container[key]]
    return holder[0]


def dumped(random: Random, tree: Any) -> bytes:
    """As bytes; half of the time canonical: keys sorted, no spaces, UTF-8."""
    canonical = random.random() < 0.5
    separators = (",", ":") if canonical else None
    try:
        text = json.dumps(tree, sort_keys=canonical, separators=separators, ensure_ascii=not canonical)
    except (TypeError, ValueError, RecursionError):  # keys that don't compare, numbers without end, depth
        return b"{}"
    deep = text.replace('"DEPTH"', (depth := random.choice(DEPTHS)) * "[" + depth * "]")
    return deep.encode("utf-8", "surrogatepass")[:MAX_BYTES]


def _places(holder: list[Any]) -> list[tuple[Any, Any]]:
    """Every container and key of it, down to a depth and number that a test can bear."""
    found: list[tuple[Any, Any]] = []
    level: list[Any] = [holder]
    for _ in range(8):
        for container in level:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            found += [(container, key) for key in keys]
        level = [inner for container, key in found[-400:] if isinstance(inner := container[key], list | dict) and inner]
        if not level or len(found) > 2000:
            break
    return found or [(holder, 0)]


def _value(random: Random) -> Any:
    kinds: tuple[Sequence[Any], ...] = (NUMBERS, TEXTS, SHALLOW, ("DEPTH",))
    chosen = random.choice(random.choice(kinds))
    return list(chosen) if isinstance(chosen, list) else dict(chosen) if isinstance(chosen, dict) else chosen


def _number_near(random: Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return random.choice(NUMBERS)
    return value + random.choice((-4096, -1, 1, 8, 4096))


def _range(random: Random, data: bytes) -> tuple[int, int]:
    at = random.randrange(len(data) + 1)
    return at, min(len(data), at + random.choice((1, 1, 2, 4, 8, 64, len(data))))


def _flip(random: Random, data: bytes, _: Pool) -> bytes:
    if not data:
        return b"\x00"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _delete(random: Random, data: bytes, _: Pool) -> bytes:
    at, end = _range(random, data)
    return data[:at] + data[end:]


def _repeat(random: Random, data: bytes, _: Pool) -> bytes:
    at, end = _range(random, data)
    return data[:end] + data[at:end] * random.choice((1, 1, 2, 100)) + data[end:]


def _insert(random: Random, data: bytes, _: Pool) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice((b"\x00", b"\xff" * 4, b"{", b'"', b"\n", random.randbytes(3))) + data[at:]


def _cut(random: Random, data: bytes, _: Pool) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _splice(random: Random, data: bytes, pool: Pool) -> bytes:
    other = random.choice(pool)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _integer(random: Random, data: bytes, _: Pool) -> bytes:
    """A little-endian number of one to eight bytes becomes an interesting one, or its neighbour."""
    width = random.choice((1, 2, 4, 8))
    if len(data) < width:
        return data + bytes(width)
    at = random.randrange(len(data) - width + 1)
    before = int.from_bytes(data[at : at + width], "little")
    after = random.choice((before + 1, before - 1, random.choice(NUMBERS[:20]))) % (1 << 8 * width)
    return data[:at] + after.to_bytes(width, "little") + data[at + width :]


def _decimal(random: Random, data: bytes, _: Pool) -> bytes:
    """Digits become others."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = end = random.choice(places)
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return data[:at] + str(random.choice(NUMBERS)).encode() + data[end:]


_OF_BYTES: Final[tuple[Mutation, ...]] = (
    _flip, _delete, _repeat, _insert, _cut, _splice, _integer, _integer, _decimal,
)  # fmt: skip
