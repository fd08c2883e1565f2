"""Processes of two builds understand each other, as long as nobody uses what only one of them has.

`data/facts.jsonl` is what an earlier build said: of each kind of fact one with what it can't be without, and one that
says all. A kind that is new gets its lines; lines that are there stay as they are.
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
    """Those of the product, all the way down."""
    for kind in base.__subclasses__():
        if kind.__module__ in MODULES:  # what others make of them stays within a process
            yield kind
            yield from facts(kind)


RECORDS: list[type[Wire]] = [RequestRecord, LifetimeRecord]
KINDS = {kind.__name__: kind for kind in [*facts(), *RECORDS]}


def understood(said: dict[str, Any], kind: type[Wire]) -> bool:
    """Whether it is read, and said again as it was: an earlier build reads that, too."""
    try:
        fact = decode(json.dumps(said).encode(), kind)
    except Refused:
        return False
    return bool(msgspec.json.decode(encode(fact)) == said)


@pytest.mark.parametrize("line", [pytest.param(each, id=f"{at}-{each['kind']}") for at, each in enumerate(SAID)])
def test_message_of_an_earlier_build_is_understood(line: dict[str, Any]) -> None:
    """It is read as it was meant, and what we say of the same it understands."""
    assert understood(line["said"], KINDS[line["kind"]])


def test_every_message_type_is_covered() -> None:
    """Also the next one."""
    assert {line["kind"] for line in SAID} == set(KINDS)


class Asked(Fact, frozen=True):
    """As it is here."""

    name: str
    count: int = 0


class Required(Fact, frozen=True):
    """With a field more, without a default."""

    name: str
    more: int
    count: int = 0


class Always(Wire, frozen=True):
    """With one that is said even where it has its default."""

    name: str
    count: int = 0
    more: int = 0


@pytest.mark.parametrize(("kind", "holds"), [(Asked, True), (Required, False), (Always, False)])
def test_incompatible_message_type_is_found(kind: type[Wire], holds: bool) -> None:
    """What breaks the rule is seen."""
    assert understood({"name": "x", "count": 1}, kind) is holds


def test_unknown_field_in_use_is_refused() -> None:
    """Not left out of account: an order would be another one, and a record would lack something."""
    assert not understood({"name": "x", "count": 1, "new": 1}, Asked)
