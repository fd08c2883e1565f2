"""A tenant's limit of requests under way as one of several activators has it: places that it leases. Pure state.

All together never lease more places than the limit, so all together never have more requests inside. Some are leased
ahead, so that few requests ask; those that nobody used go back with the next renewal. Who does not renew loses them.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

LEASED_S: Final = 5.0  # for which the store keeps them for one that is silent
GOOD_S: Final = 4.0  # for which we use them: the store's clock began later than ours, and may be quicker
RENEW_S: Final = 1.0
AHEAD: Final = 20  # parts of the limit, one of which is leased ahead
QUIET_S: Final = 0.1  # between two questions while there is none to be had


@dataclass(slots=True)
class Leased:
    """Of one tenant. Times are seconds of this process's clock; `inside` is its requests that are under way here."""

    places: int = 0
    ends_s: float = -inf
    quiet_until_s: float = -inf
    most: int = 0  # inside at once since the last renewal

    def has_place(self, inside: int, now_s: float) -> bool:
        """For one more."""
        return inside < self.places and now_s < self.ends_s

    def used(self, inside: int) -> None:
        """So many are inside now."""
        self.most = max(self.most, inside)

    def want(self, inside: int, waiting: int, limit: int) -> int:
        """To be asked for so that those who wait come in: places in all, some ahead."""
        return min(limit, inside + waiting + max(1, limit // AHEAD))

    def renewal(self, inside: int) -> int:
        """To be asked for so that what was used stays: none where nobody came."""
        self.most, most = inside, max(inside, self.most)
        return most

    def asked(self, want: int) -> None:
        """Of the store: what goes back is not used any more, since the answer may come after others had it."""
        self.places = min(self.places, want)

    def told(self, want: int, granted: int, sent_s: float, now_s: float) -> None:
        """The store's answer to a question of `sent_s`. Others have the places where it grants less than was wanted."""
        self.places = granted
        self.ends_s = sent_s + GOOD_S
        if granted < want:
            self.quiet_until_s = now_s + QUIET_S

    def is_idle(self, inside: int) -> bool:
        """Whether it tells no more than a new one would."""
        return not (inside or self.places or self.most)


def share(limit: int, members: int) -> int:
    """Of one activator that can ask nobody."""
    return max(1, limit // members)
