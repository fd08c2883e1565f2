"""Processes of two builds can decode each other's messages, unless a message uses a field that only one build has.

`data/facts.jsonl` holds messages of earlier builds: two of each type, one with the required fields only and one with
all fields. A new type gets its lines. Existing lines are never changed.
"""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kelvin.contracts
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import Fact, Wire, decode, encode

MODULES = [each.name for each in pkgutil.walk_packages(kelvin.contracts.__path__, "kelvin.contracts.")]
MODULES += ["weightcache.client.lease_protocol", "weightcache.peers.peer_protocol"]
for _name in MODULES:
    importlib.import_module(_name)

SAID = [json.loads(line) for line in (Path(__file__).parent / "data" / "facts.jsonl").read_text().splitlines()]


def facts(base: type[Fact] = Fact) -> Iterator[type[Wire]]:
    """Yield the product's message types, with all subclasses."""
    for kind in base.__subclasses__():
        if kind.__module__ in MODULES:  # types that other modules derive stay within one process
            yield kind
            yield from facts(kind)


RECORDS: list[type[Wire]] = [RequestRecord, LifetimeRecord]
KINDS = {kind.__name__: kind for kind in [*facts(), *RECORDS]}


def understood(said: dict[str, Any], kind: type[Wire]) -> bool:
    """Return whether `said` decodes and encodes back to the same JSON, which an earlier build can read."""
    try:
        fact = decode(json.dumps(said).encode(), kind)
    except Refused:
        return False
    return bool(msgspec.json.decode(encode(fact)) == said)


@pytest.mark.parametrize("line", [pytest.param(each, id=f"{at}-{each['kind']}") for at, each in enumerate(SAID)])
def test_message_of_an_earlier_build_is_understood(line: dict[str, Any]) -> None:
    """A recorded message decodes, and encodes to the same JSON as before."""
    assert understood(line["said"], KINDS[line["kind"]])


def test_every_message_type_is_covered() -> None:
    """Every message type of the product has recorded messages."""
    assert {line["kind"] for line in SAID} == set(KINDS)


class Asked(Fact, frozen=True):
    """The message type of this build."""

    name: str
    count: int = 0


class Required(Fact, frozen=True):
    """The same with one more required field."""

    name: str
    more: int
    count: int = 0


class Always(Wire, frozen=True):
    """The same with one more field that is encoded even if it has its default."""

    name: str
    count: int = 0
    more: int = 0


@pytest.mark.parametrize(("kind", "holds"), [(Asked, True), (Required, False), (Always, False)])
def test_incompatible_message_type_is_found(kind: type[Wire], holds: bool) -> None:
    """Negative control: a required field or an always-encoded field breaks the rule."""
    assert understood({"name": "x", "count": 1}, kind) is holds


def test_unknown_field_in_use_is_refused() -> None:
    """An unknown field is refused, because ignoring it would change a command or drop part of a record."""
    assert not understood({"name": "x", "count": 1, "new": 1}, Asked)
