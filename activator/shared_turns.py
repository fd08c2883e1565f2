"""Tells the queues of several activators of each other, through a store, while somebody waits. No request waits for it.

One question at a time for each version, in a task of its own. While the store is away each queue is fair by itself.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from activator.asking import Asking, Scripts, each
from activator.keys import VersionKey
from activator.line import Waiter
from activator.policy.fair import FairQueue
from activator.policy.turns import PAUSE_S, Answer, Question, Turns
from activator.shared_rates import Away

KEPT_MS: Final = 60_000
MOST: Final = 16_384  # counters of one version; beyond that it begins anew

# A hash of counters, floors and an epoch. In: the asker's epoch, one for a store that begins anew, how long it is kept,
# how many counters at most, groups; of each its name, its floor and its rows; of each row key, value, more, least ('':
# nothing). Out: the epoch, and of each group the floor and the rows' values. Numbers as text: Redis cuts fractions off.
MEET: Final = """
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- takes no memory, so that a full Redis goes on
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[4]) then redis.call('DEL', KEYS[1]) end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  epoch = ARGV[2]
  redis.call('HSET', KEYS[1], 'epoch', epoch)
end
local step = epoch == ARGV[1]
local out = {epoch}
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  local group, own_floor, rows = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  at = at + 3
  local floor = tonumber(redis.call('HGET', KEYS[1], 'floor:' .. group) or own_floor)
  if step then floor = math.max(floor, own_floor) end
  redis.call('HSET', KEYS[1], 'floor:' .. group, string.format('%.17g', floor))
  out[#out + 1] = string.format('%.17g', floor)
  for _ = 1, rows do
    local name, own = 'of:' .. group .. ':' .. ARGV[at], tonumber(ARGV[at + 1])
    local known = tonumber(redis.call('HGET', KEYS[1], name) or '')
    local value
    if not step then
      value = math.max(known or floor, floor + math.max(0, own - own_floor))
    elseif known then
      value = known + ARGV[at + 2]
      if ARGV[at + 3] ~= '' then value = math.max(value, tonumber(ARGV[at + 3])) end
    else
      value = math.max(own, floor)
    end
    value = string.format('%.17g', value)
    redis.call('HSET', KEYS[1], name, value)
    out[#out + 1] = value
    at = at + 4
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return out
"""


class Store(Scripts, Protocol):
    """Runs scripts, and knows who else does."""

    @property
    def members(self) -> int:
        """Activators that use it, as far as is known; 1 or more."""
        ...


@dataclass(slots=True)
class _Kept:
    """A version for which somebody waits, or did a moment ago."""

    queue: FairQueue[Waiter]
    turns: Turns = field(default_factory=Turns)


class SharedTurns:
    """Of all versions. `clock` is monotonic seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: dict[VersionKey, _Kept] = {}
        self._asking: Asking[VersionKey] = Asking()

    def __repr__(self) -> str:
        return f"<SharedTurns versions={len(self._kept)} {self._asking!r} {self._store!r}>"

    def waits(self, key: VersionKey, queue: FairQueue[Waiter]) -> None:
        """Somebody began to wait there. Returns at once."""
        kept = self._kept.get(key)
        if kept is None or kept.queue is not queue:
            kept = self._kept[key] = _Kept(queue)
        self._try_ask(key, kept)

    def gave(self, key: VersionKey, queue: FairQueue[Waiter]) -> None:
        """Somebody who waited there has a slot. Returns at once."""
        kept = self._kept.get(key)
        if kept is not None and kept.queue is queue:
            kept.turns.given += 1
            self._try_ask(key, kept)

    async def run(self) -> None:
        """Go on while somebody waits, whether or not anything is given; until cancelled."""
        await each(PAUSE_S, self.tend)

    async def tend(self) -> None:
        """Once."""
        for key, kept in list(self._kept.items()):
            if len(kept.queue):
                self._try_ask(key, kept)
            elif key not in self._asking and not kept.turns.is_recent(self._clock()):
                del self._kept[key]

    async def close(self) -> None:
        """Wait for what is being asked, which ends by itself."""
        await self._asking.answered()

    def _try_ask(self, key: VersionKey, kept: _Kept) -> None:
        """With nobody else there is nothing to ask, and while the store is away it is no use."""
        if key in self._asking or not self._store.is_up or self._store.members < 2:
            return
        now_s = self._clock()
        if kept.turns.is_due(now_s):
            self._asking.start(key, self._ask(key, kept, kept.turns.ask(kept.queue, now_s)))

    async def _ask(self, key: VersionKey, kept: _Kept, asked: Question) -> None:
        try:
            name = f"kelvin:{{{key.tenant}/{key.version}}}:turns"
            told = await self._store.ask(MEET, (name,), *_words(asked))
            kept.turns.told(kept.queue, asked, _read(asked, told))
        except Away:
            kept.turns.lost()
        except BaseException:
            kept.turns.lost()
            raise


def _words(asked: Question) -> list[str | int]:
    words: list[str | int] = [asked.epoch, secrets.token_hex(8), KEPT_MS, MOST, len(asked.groups)]
    for group in asked.groups:
        words += [group.name, repr(group.floor), len(group.rows)]
        for row in group.rows:
            least = "" if row.least == float("-inf") else repr(row.least)
            words += [str(row.key), repr(row.own), repr(row.more), least]
    return words


def _read(asked: Question, told: list[bytes]) -> Answer:
    numbers = iter(told[1:])
    groups = tuple((float(next(numbers)), tuple(float(next(numbers)) for _ in group.rows)) for group in asked.groups)
    return Answer(told[0].decode(), groups)
