"""A history: operations and faults, one after another, each with the time before it and a seed of its own.

A step draws all that it needs from its own seed: a history without some of its steps plays the others as before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Self

PAUSES_MS: Final = (0, 1, 20, 200, 1_000, 5_000, 30_000, 120_000)
PAUSE_WEIGHTS: Final = (10, 4, 8, 6, 5, 3, 2, 1)
OPERATION_WEIGHTS: Final = (0, 1, 1, 1, 4)  # by how much a history prefers an operation: many leave some of them out


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
        """Read what `str` wrote."""
        after_ms, kind, seed = text.split()
        return cls(int(after_ms), kind, int(seed))


@dataclass(frozen=True, slots=True)
class History:
    """What happens in one world. `seed` also decides how the world is made and how its network behaves."""

    world: str
    seed: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.world} {self.seed}", *map(str, self.steps)])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote."""
        head, *lines = [line for line in text.splitlines() if line.strip()]
        world, seed = head.split()
        return cls(world, int(seed), tuple(map(Step.parse, lines)))

    def with_steps(self, steps: Iterable[Step]) -> "History":
        """Return the same history with these steps alone."""
        return History(self.world, self.seed, tuple(steps))


def draw_history(world: str, operations: Mapping[str, int], seed: int, steps_max: int) -> History:
    """Draw a history. Each prefers some operations and leaves others out, so that rare combinations come up."""
    random = Random(f"{world} {seed}")
    weights = {kind: weight * random.choice(OPERATION_WEIGHTS) for kind, weight in sorted(operations.items())}
    if not any(weights.values()):
        weights = dict(sorted(operations.items()))
    count = random.randint(min(4, steps_max), steps_max)
    hurry = random.random() < 0.3  # everything happens at once
    steps = []
    for _ in range(count):
        pause_ms = random.choices(PAUSES_MS[:4] if hurry else PAUSES_MS, PAUSE_WEIGHTS[:4] if hurry else PAUSE_WEIGHTS)
        kind = random.choices(list(weights), list(weights.values()))
        steps.append(Step(random.randint(0, pause_ms[0]), kind[0], random.randrange(1 << 32)))
    return History(world, seed, tuple(steps))
