"""Model directories for the drills: one that is served, and as many as are pushed, each with weights of its own."""

from itertools import count
from pathlib import Path

from tests.e2e.tiny_models import make_tiny


class TinyModels:
    """Some three hundred kilobytes each, one token for each word."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._seeds = count(1000)
        self.served = make_tiny(work / "served-model", "llama", seed=1)

    def fresh(self) -> Path:
        """One that nobody has pushed."""
        seed = next(self._seeds)
        return make_tiny(self._work / f"model-{seed}", "llama", seed=seed)
