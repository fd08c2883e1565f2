"""Any number of threads can decode wire types. Each type's decoder is built by one thread."""

import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import MAX_RULE, BadJson, Wire, convert, decode, decode_any, decode_lenient, decoder

# Sixty new types are each decoded by four threads at once, which switch as often as possible.
RACE = """
import resource, sys, threading, msgspec
from kelvin.contracts.wire import decoder

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.setswitchinterval(1e-6)
decode = {"ours": lambda raw, kind: decoder(kind).decode(raw), "plain": lambda raw, kind: msgspec.json.decode(raw, type=kind)}[sys.argv[1]]
fields = [f"f{n}" for n in range(8)]
for turn in range(60):
    inner = [msgspec.defstruct(f"Inner{n}", [(name, "int | None") for name in fields]) for n in range(4)]
    outer = msgspec.defstruct("Outer", [(f"part{n}", kind) for n, kind in enumerate(inner)])
    raw = msgspec.json.encode({f"part{n}": dict.fromkeys(fields, n) for n in range(4)})
    gate = threading.Barrier(4)
    found = []
    threads = [threading.Thread(target=lambda: (gate.wait(), found.append(decode(raw, outer)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [msgspec.json.encode(each) for each in found] == [raw] * 4
"""  # noqa: E501


def race(how: str) -> int:
    return subprocess.run([sys.executable, "-c", RACE, how], check=False, timeout=120).returncode


class Part(Wire, frozen=True):
    """A type that refuses unknown fields."""

    size: int


class Loose(msgspec.Struct):
    """A type that ignores unknown fields."""

    size: int


def test_threads_can_decode_a_new_type_at_once() -> None:
    """No thread sees a partly initialised type."""
    assert race("ours") == 0


def test_msgspec_decoder_crashes_under_first_use_race() -> None:
    """Negative control: msgspec's own call soon crashes the process. If this test fails, msgspec has been fixed."""
    assert any(race("plain") == -signal.SIGSEGV for _ in range(5))


def test_equal_types_share_one_decoder() -> None:
    assert decoder(Part) is decoder(Part)
    assert decoder(tuple[Part, ...]) is decoder(tuple[Part, ...])
    assert decoder(tuple[Part, ...]).decode(b'[{"size":1}]') == (Part(size=1),)


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        pytest.param(b'{"size":"1"}', "Expected `int`, got `str` - at `$.size`", id="another type"),
        pytest.param(b'{"size":1,"more":2}', "unknown field `more`", id="an unknown field"),
        pytest.param(b'{"size":1', "truncated", id="a cut text"),
        pytest.param(b"[]", "Expected `object`, got `array`", id="no object"),
    ],
)
def test_misfit_is_refused_with_the_rule(raw: bytes, rule: str) -> None:
    """The error contains the rule and the field."""
    with pytest.raises(Refused) as caught:
        decode(raw, Part, field="part")
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"size":', id="a cut text"),
        pytest.param(b"[" * 100_000, id="nested too deeply"),
        pytest.param(b'{"more":' + b"[" * 100_000, id="nested too deeply in an unknown field"),
        pytest.param(b'{"size":"\xff"}', id="no UTF-8"),
        pytest.param(b'{"size":' + b"1" * 10_000 + b"}", id="a number of ten thousand digits"),
        pytest.param('{"size":"\udcff"', id="a text that no UTF-8 can hold"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(decoder(Part).decode, id="a type"),
        pytest.param(decoder(Loose).decode, id="a type with unknown fields"),
        pytest.param(decode_any, id="any type"),
        pytest.param(decode_lenient, id="any type, leniently"),
    ],
)
def test_invalid_input_raises_bad_json(read: Callable[[bytes | str], object], raw: bytes | str) -> None:
    """All invalid input raises `BadJson`, with a short text."""
    with pytest.raises(BadJson) as caught:
        read(raw)
    assert len(str(caught.value)) <= MAX_RULE


def test_files_of_a_model_may_contain_infinity() -> None:
    """`Infinity`, which Python writes, is accepted in a model's files, because pushes have always accepted it."""
    assert decode_lenient(b'{"size": Infinity}') == {"size": float("inf")}
    with pytest.raises(BadJson):
        decode_any(b'{"size": Infinity}')


def test_plain_objects_convert_to_structs() -> None:
    """JSON that was parsed elsewhere is converted to a struct."""
    assert convert({"size": 1}, Part) == Part(size=1)
