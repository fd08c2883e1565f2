"""Clocks and randomness of one history: the simulation replaces all sources of both while it plays."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from unittest import mock

from activator.http import exchange
from tests.simulation.core.simulation_loop import SimulationLoop

WALL_S: Final = 1_767_960_000.0  # 2026-01-09 12:00 UTC, the start of a history


@dataclass
class Clocks:
    """The clocks of one history. The monotonic clock is the loop's, and the wall clock can be stepped."""

    loop: SimulationLoop
    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return self.loop.time()

    def monotonic_ns(self) -> int:
        return round(self.loop.time() * 1e9)

    def wall(self) -> float:
        return WALL_S + self.loop.time() + self.ahead_s

    def wall_ns(self) -> int:
        return round(self.wall() * 1e9)


@contextlib.contextmanager
def deterministic(seed: int, loop: SimulationLoop) -> Iterator[Clocks]:
    """Replace all clocks and random sources inside the block."""
    clocks, chance = Clocks(loop), random.Random(seed)
    before = random.getstate()
    random.seed(seed)
    with contextlib.ExitStack() as stack:
        for module, name, substitute in (
            (time, "monotonic", clocks.monotonic),
            (time, "monotonic_ns", clocks.monotonic_ns),
            (time, "perf_counter", clocks.monotonic),
            (time, "time", clocks.wall),
            (time, "time_ns", clocks.wall_ns),
            (os, "urandom", chance.randbytes),
            (random, "_urandom", chance.randbytes),
        ):
            stack.enter_context(mock.patch.object(module, name, substitute))
        stack.enter_context(mock.patch.object(exchange, "_chances", exchange._draw()))  # it draws some in advance
        try:
            yield clocks
        finally:
            random.setstate(before)
