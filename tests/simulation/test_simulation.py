"""Histories of fixed and random seeds break no invariant in any world."""

import os
import random
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.simulation.conftest import PLAYED, RecordProperty
from tests.simulation.core.history_player import search_seeds, shrink_history
from tests.simulation.worlds import WORLDS

BASE_SEED: Final = 2_026_0000
SMOKE: Final = {"cache": 80, "door": 120, "ledger": 60, "machine": 45}  # histories
DEEP: Final = 2000  # histories of all worlds together
LONG_S: Final = float(os.environ.get("KELVIN_SIMULATION_S", "3600"))  # seconds of all worlds together


def _counted(seeds: Iterator[int], played: list[int]) -> Iterator[int]:
    for seed in seeds:
        played.append(seed)
        yield seed


def _hold(world: str, seeds: Iterator[int], record_property: RecordProperty | None = None) -> None:
    played: list[int] = []
    found = search_seeds(WORLDS[world], _counted(seeds, played))
    if record_property is not None:
        record_property(PLAYED, f"{world}: {len(played)} histories, seeds {played[0]} to {played[-1]}")
    if found is not None:
        seed = found.history.seed
        again = f"python -m tests.simulation {world} --seed {seed}"
        pytest.fail(f"{shrink_history(WORLDS[world], found)}\n--- again: {again}", pytrace=False)


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_histories_of_fixed_seeds_hold(world: str) -> None:
    """The same histories run each time, as many as take a few seconds."""
    _hold(world, iter(range(BASE_SEED, BASE_SEED + SMOKE[world])))


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_histories_of_random_seeds_hold(world: str, record_property: RecordProperty) -> None:
    """Two thousand new histories are played in all."""
    begin = random.SystemRandom().randrange(1 << 40)
    _hold(world, iter(range(begin, begin + DEEP // len(WORLDS))), record_property)


@pytest.mark.deep
@pytest.mark.long
@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_an_hour_of_histories_holds(world: str, record_property: RecordProperty) -> None:
    """As many histories are played as fit into an hour, one world after another."""
    begin = random.SystemRandom().randrange(1 << 40)
    until_s = time.perf_counter() + LONG_S / len(WORLDS)

    def seeds() -> Iterator[int]:
        seed = begin
        while time.perf_counter() < until_s:
            yield seed
            seed += 1

    _hold(world, seeds(), record_property)
