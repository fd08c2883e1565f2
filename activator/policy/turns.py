"""Virtual token counters that the queues of several activators have in common: what one of them tells and hears.

Each queue orders by its own copy, so that nobody waits for the others. What was done to a counter since it was last
told is a map `c -> max(c + more, least)`: tokens are given, and who returns is lifted to where the others are. Such
maps compose, so that nothing is lost, whoever tells first. Of what the others gave since it last heard of them a queue
knows nothing; with W tokens of that, two tenants that wait are at most two of their largest requests and 2 W apart.

One that has not spoken for a while, or finds a store that began anew, is out of step: its scale is another. What is
told of it then is how far each is ahead of its floor, and its whole scale is moved to the store's.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

from activator.policy.fair import Counters, FairQueue, K, T

EVERY: Final = 10  # requests given to who waited, after which it is told at the latest
PAUSE_S: Final = 1.0  # after which it is told as long as somebody waits
LULL_S: Final = 3.0  # after which it is out of step: nobody waited, and what was given then is no matter


@dataclass(slots=True)
class Change:
    """What was done to a counter."""

    more: float = 0.0
    least: float = -inf

    def add(self, amount: float) -> None:
        """It was given so much."""
        self.more += amount
        self.least += amount

    def lift(self, least: float) -> None:
        """It is nowhere below."""
        self.least = max(self.least, least)

    def of(self, value: float) -> float:
        """What becomes of it."""
        return max(value + self.more, self.least)


class Row(NamedTuple):
    """One counter: its value here, and what became of it since it was last told."""

    key: Any
    own: float
    more: float
    least: float


@dataclass(slots=True)
class SharedCounters(Counters[K]):
    """Notes what is done to them. The base by name: `super()` does not know a class that has slots by decoration."""

    _changes: dict[K, Change] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """Where the last that was served began."""
        return self._floor

    def join(self, key: K) -> None:
        """See `Counters`."""
        before = self._given.get(key)
        Counters.join(self, key)
        if before is None or self._given[key] > before:
            self._changed(key).lift(self._given[key])

    def give(self, key: K, amount: float) -> None:
        """See `Counters`."""
        Counters.give(self, key, amount)
        self._changed(key).add(amount)

    def correct(self, key: K, amount: float) -> None:
        """See `Counters`."""
        if key in self._given:
            Counters.correct(self, key, amount)
            self._changed(key).add(amount)

    def rows(self, waiting: "set[K]") -> tuple[Row, ...]:
        """What is to be told of those that wait and those that changed; from now on it counts as told."""
        changes, self._changes = self._changes, {}
        keys = [key for key in self._given if key in waiting or key in changes]
        each = ((key, changes.get(key, _NONE)) for key in keys)
        return tuple(Row(key, self._given[key], change.more, change.least) for key, change in each)

    def heard(self, values: "dict[K, float]", floor: float, moved: float) -> None:
        """The values of those rows with everybody's part; what was done here since is on top of that. The scale of all
        others is moved by so much.
        """
        self._floor = max(self._floor + moved, floor)
        for key in self._given:
            self._given[key] += moved
        for change in self._changes.values():
            change.least += moved
        for key, value in values.items():
            if key in self._given:
                self._given[key] = self._changes.get(key, _NONE).of(value)

    def _changed(self, key: K) -> Change:
        found = self._changes.get(key)
        if found is None:
            if len(self._changes) > 2 * len(self._given) + 16:  # of those whose counters are forgotten
                self._changes = {each: change for each, change in self._changes.items() if each in self._given}
            found = self._changes[key] = Change()
        return found


_NONE: Final = Change()


class Group(NamedTuple):
    """Counters of one kind: of the ranks, or of the tenants in one rank."""

    name: str
    floor: float
    rows: tuple[Row, ...]


class Question(NamedTuple):
    """What a queue tells. `epoch` is the store's as it was last heard of, "" out of step."""

    epoch: str
    groups: tuple[Group, ...]
    sent_s: float


class Answer(NamedTuple):
    """Of each group the floor, and of each of its rows the value."""

    epoch: str
    groups: tuple[tuple[float, tuple[float, ...]], ...]


@dataclass(slots=True)
class Turns:
    """When a version's queue speaks. Times are monotonic seconds."""

    epoch: str = ""
    spoke_s: float = -inf
    given: int = 0  # requests, since it spoke

    def is_due(self, now_s: float) -> bool:
        """Whether to speak: somebody waits."""
        return self.given >= EVERY or now_s - self.spoke_s >= PAUSE_S

    def is_recent(self, now_s: float) -> bool:
        """Whether it is in step still."""
        return now_s - self.spoke_s < LULL_S

    def ask(self, queue: FairQueue[T], now_s: float) -> Question:
        """Then `told` or `lost` is owed, and nothing is asked before."""
        if not self.is_recent(now_s):
            self.epoch = ""
        self.spoke_s, self.given = now_s, 0
        groups = tuple(
            Group(name, counters.floor, counters.rows(waiting))
            for name, counters, waiting in queue.groups()
            if isinstance(counters, SharedCounters)
        )
        return Question(self.epoch, groups, now_s)

    def told(self, queue: FairQueue[T], asked: Question, answer: Answer) -> None:
        """The store's answer."""
        all_counters = {name: counters for name, counters, _ in queue.groups()}
        in_step = answer.epoch == asked.epoch
        self.epoch = answer.epoch
        for group, (floor, values) in zip(asked.groups, answer.groups, strict=True):
            counters = all_counters[group.name]
            assert isinstance(counters, SharedCounters)
            known = {row.key: value for row, value in zip(group.rows, values, strict=True)}
            counters.heard(known, floor, 0.0 if in_step else floor - group.floor)

    def lost(self) -> None:
        """No answer: nobody knows whether it was heard."""
        self.epoch = ""
