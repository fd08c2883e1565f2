"""A history: a sequence of operations and faults, each with the time before it and its own seed.

A step draws everything from its own seed, so a history without some of its steps plays the others as before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Self

PAUSES_MS: Final = (0, 1, 20, 200, 1_000, 5_000, 30_000, 120_000)
PAUSE_WEIGHTS: Final = (10, 4, 8, 6, 5, 3, 2, 1)
OPERATION_WEIGHTS: Final = (0, 1, 1, 1, 4)  # how strongly a history prefers an operation; 0 leaves it out


@dataclass(frozen=True, slots=True)
class Step:
    """One operation or fault, `after_ms` of virtual time after the one before."""

    after_ms: int
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.after_ms} {self.kind} {self.seed}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that `str` wrote."""
        after_ms, kind, seed = text.split()
        return cls(int(after_ms), kind, int(seed))


@dataclass(frozen=True, slots=True)
class History:
    """The steps of one world. `seed` also decides how the world is built and how its network behaves."""

    world: str
    seed: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.world} {self.seed}", *map(str, self.steps)])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that `str` wrote."""
        head, *lines = [line for line in text.splitlines() if line.strip()]
        world, seed = head.split()
        return cls(world, int(seed), tuple(map(Step.parse, lines)))

    def with_steps(self, steps: Iterable[Step]) -> "History":
        """Return the same history with only these steps."""
        return History(self.world, self.seed, tuple(steps))


def draw_history(world: str, operations: Mapping[str, int], seed: int, steps_max: int) -> History:
    """Draw a history. Each prefers some operations and leaves others out, so that rare combinations come up."""
    random = Random(f"{world} {seed}")
    weights = {kind: weight * random.choice(OPERATION_WEIGHTS) for kind, weight in sorted(operations.items())}
    if not any(weights.values()):
        weights = dict(sorted(operations.items()))
    count = random.randint(min(4, steps_max), steps_max)
    hurry = random.random() < 0.3  # all steps follow each other at once
    steps = []
    for _ in range(count):
        pause_ms = random.choices(PAUSES_MS[:4] if hurry else PAUSES_MS, PAUSE_WEIGHTS[:4] if hurry else PAUSE_WEIGHTS)
        kind = random.choices(list(weights), list(weights.values()))
        steps.append(Step(random.randint(0, pause_ms[0]), kind[0], random.randrange(1 << 32)))
    return History(world, seed, tuple(steps))
