"""Of a replica's slots, how many are one activator's: as many as it wants where there is enough for all, else by equal
parts. Pure, but for what one activator knows of its own; finding out is `shared_slots`'.

A request is given a slot that its activator has; who finds none free waits in line while more are asked for. Each says
how many it needs, those that it uses and those that wait, and wants some ahead beside them. Where all need more than
there is, needs are cut to a level that is the same for all, and the slots that don't divide go round; what is left of
them is divided so among those who want some ahead: many who use little leave most to one who needs it. Who has more
than its part gives no more requests to them: they go to the others as its requests end. So all together never have more
inside than there are slots, but for the requests of who was silent for so long that its slots went to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

TURN_S: Final = 2.0  # for which slots that don't divide stay where they are: who asks each second hears of each turn
AHEAD: Final = 8  # parts of the slots, one of which is leased ahead


class Wish(NamedTuple):
    """What the store is asked: `keep` are ours in any case until we ask again, since they may be in use by then; of
    those that are wanted so many are needed, the others are ahead.
    """

    keep: int
    need: int
    want: int


@dataclass(slots=True)
class SlotLease:
    """Of one replica. `most` requests were inside at once since the last question."""

    slots: int = 0  # that may be taken from here
    held: int = 0  # by us, as the store knows: more than that until we say that the rest is not in use
    most: int = 0
    wished: int = 0  # as the store knows
    called: int = 0  # requests that belong there and wait for an answer
    short_until_s: float = -inf  # there was less than was wanted

    def used(self, inside: int) -> None:
        """So many are inside now."""
        self.most = max(self.most, inside)

    def ask(self, inside: int, waiting: int, slots: int) -> Wish:
        """For so many who wait, beside those who belong there, of so many slots: none where nobody came since. What is
        given back by it is not used any more, since the answer may come after others had it.
        """
        used, self.most = max(self.most, inside), inside
        waiting += self.called
        need = min(slots, max(used, inside + waiting))
        want = min(slots, need + max(1, slots // AHEAD)) if need else 0
        self.slots = min(self.slots, want)
        return Wish(max(inside, self.slots), need, want)

    def stay(self, inside: int) -> Wish:
        """No more than what is ours by now, after a time in which nobody could be asked: others have to say so, too."""
        self.most = inside
        own = max(inside, self.slots)
        return Wish(own, own, own)

    def leave(self, inside: int) -> Wish:
        """Nobody is let in any more."""
        self.slots = 0
        return Wish(inside, 0, 0)

    def told(self, wish: Wish, slots: int) -> None:
        """The store's answer."""
        self.slots, self.held, self.wished = slots, max(slots, wish.keep), wish.want

    def gives_back(self, inside: int) -> bool:
        """Whether others may have one that was ours."""
        return self.held > max(self.slots, inside)

    def is_idle(self, inside: int) -> bool:
        """Whether it tells no more than a new one would."""
        return not (self.slots or self.held or self.wished or self.most or inside or self.called)


def part_of(slots: int, wishes: Sequence[Wish], me: int, turn: int) -> int:
    """Of so many slots the part of the one that stands at `me`, of all that want some, in an order that is the same for
    each of them. `turn` counts up.
    """
    needs = [wish.need for wish in wishes]
    part = _level(slots, needs, me, turn)
    left = slots - sum(needs)
    return part if left <= 0 else part + _level(left, [wish.want - wish.need for wish in wishes], me, turn)


def _level(slots: int, wants: Sequence[int], me: int, turn: int) -> int:
    left, many = slots, len(wants)
    for want in sorted(wants):
        if want * many > left:
            break
        left -= want
        many -= 1
    if not many:
        return wants[me]
    level, odd = divmod(left, many)
    if wants[me] <= level:
        return wants[me]
    above = [at for at, want in enumerate(wants) if want > level]
    return level + int((above.index(me) + turn) % len(above) < odd)
