"""What a version's concurrency is reported as where its model scales by tokens, too: as many requests at once as what
is inside amounts to. Pure.

The decider wants so many replicas as `reported / (0.7 x target)`, whatever a request takes. One of which `n` tokens are
left holds its slot for `n / p` seconds, where `p` is what a slot was measured to compute in a second; it counts as
`n / (p x backlog_s)`. So a replica at its target, `target` slots that compute `target x p` a second, has `backlog_s`
seconds before it, and what is inside that would take it longer asks for more of them, in proportion. It is never less
than the requests themselves: they hold slots, of which a replica has so many, however little they are.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from activator.policy.expected import Measured

MOST: Final = 1e6  # requests at once: no fleet serves more, and what is reported is a number


class Inside(NamedTuple):
    """A request that waits or runs: tokens as they were estimated, and those that were computed so far."""

    estimated: int
    computed: int


def left(each: Inside, share: float) -> float:
    """Tokens that are still to be computed, where answers take `share` of what is estimated; never below 0."""
    return max(0.0, each.estimated * share - each.computed)


def weighed(
    concurrency: float, inside: Iterable[Inside], waiting: int, measured: Measured | None, backlog_s: float
) -> float:
    """Requests at once. `concurrency` itself where nothing was measured, or `backlog_s` is 0; never less than that, nor
    than 1 while any are `waiting`.
    """
    if measured is None or backlog_s <= 0:
        return concurrency
    tokens = sum(left(each, measured.share) for each in inside)
    if not tokens:
        return max(concurrency, 1.0 if waiting else 0.0)
    of_one = measured.tokens_per_s * backlog_s
    by_tokens = tokens / of_one if tokens < MOST * of_one else MOST
    return max(concurrency, by_tokens, 1.0 if waiting else 0.0)
