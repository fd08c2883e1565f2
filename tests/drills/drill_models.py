"""Model directories for the drills: one that is served, and any number to push, each with its own weights."""

from itertools import count
from pathlib import Path

from tests.e2e.tiny_models import make_tiny


class TinyModels:
    """Tiny models of about 300 kB each, with one token per word."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._seeds = count(1000)
        self.served = make_tiny(work / "served-model", "llama", seed=1)

    def fresh(self) -> Path:
        """Return a model directory that was never pushed."""
        seed = next(self._seeds)
        return make_tiny(self._work / f"model-{seed}", "llama", seed=seed)
