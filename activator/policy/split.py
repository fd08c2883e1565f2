"""Which of the versions that share a model's requests has one: always the same for whoever asks.

Weighted rendezvous hashing (Thaler and Ravishankar, 1996; weights by Schindelhauer and Schomaker, 2005): who asks goes
to the version with the highest score. A version whose weight grows takes from the others and gives nothing up, so that
a split that is shifted step by step moves nobody back and forth.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import log
from typing import Final

_RANGE: Final = 1 << 64


def assign(weights: Mapping[str, int], who: str) -> str:
    """A version. Weights are 1 or more, of one version at least; ties, which nobody will see, are by name."""
    return max(weights, key=lambda version: (_score(version, weights[version], who), version))


def _score(version: str, weight: int, who: str) -> float:
    drawn = int.from_bytes(blake2b(f"{version} {who}".encode(), digest_size=8).digest())
    return -weight / log((drawn + 0.5) / _RANGE)
