"""Which one-time tokens were used: as this process knows, or as several activators do over one store.

A token is spent once its signature is good, and known as spent until it would have expired anyway. What was issued
before that is known of is refused, as it may have been spent.
"""

import hashlib
from collections.abc import Callable
from math import ceil, inf
from typing import Final, Protocol

from activator.asking import Scripts
from activator.policy.spent import Spent
from activator.shared_rates import Away
from contracts.errors import Refused, Unavailable

KEPT_MS: Final = 30 * 86_400_000
APART_S: Final = 60  # clocks of activators and the store differ by less

# Since when the store knows what was spent, and a name for each token that was. One that lost its data knows it from
# then on. In: the time by which it was issued for certain, until when it is good, how long the first is kept. Out: 1
# where it is spent now.
SPEND: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local since = tonumber(redis.call('GET', KEYS[1]) or '')
if not since then since = now end
redis.call('DEL', KEYS[1]) -- takes no memory, so that a full Redis goes on
redis.call('SET', KEYS[1], string.format('%.6f', since), 'PX', ARGV[3])
local left = math.ceil((ARGV[2] - now) * 1000)
if tonumber(ARGV[1]) <= since or left <= 0 then return 0 end
if redis.call('SET', KEYS[2], '1', 'NX', 'PX', string.format('%.0f', left)) then return 1 end
return 0
"""


class OneTime(Protocol):
    """Knows tokens by issuer and `jti`. Times are seconds of 1970."""

    @property
    def since_s(self) -> float:
        """From when on it is known what was spent, as far as that is known without asking."""
        ...

    async def try_spend(self, name: tuple[str, str], issued_s: float, until_s: float) -> bool:
        """Whether it is spent now, and was not before. `issued_s`: it was not issued earlier. Raises
        Refused(Unavailable) while that can't be known. Cancelled, it may be spent or not.
        """
        ...


class OwnOneTime:
    """Of one activator, since now."""

    def __init__(self, wall_s: Callable[[], float], spent: Spent | None = None) -> None:
        self._wall_s = wall_s
        self._spent = Spent() if spent is None else spent
        self.since_s = wall_s()

    def __repr__(self) -> str:
        return repr(self._spent)

    async def try_spend(self, name: tuple[str, str], issued_s: float, until_s: float) -> bool:
        """See `OneTime`; returns at once."""
        if issued_s <= self.since_s or self._spent.has(name):
            return False
        if self._spent.is_full(self._wall_s()):  # to forget one would let it in again
            raise Refused(Unavailable("the memory of one-time tokens"))
        self._spent.spend(name, until_s)
        return True


class SharedOneTime:
    """Of several activators. While the store is away nobody with such a token is let in."""

    since_s = -inf  # the store knows

    def __init__(self, store: Scripts) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<SharedOneTime {self._store!r}>"

    async def try_spend(self, name: tuple[str, str], issued_s: float, until_s: float) -> bool:
        """See `OneTime`. Waits for the store at most as long as it may take to answer, not while it is away."""
        issuer, token = (hashlib.sha256(each.encode()).hexdigest()[:32] for each in name)
        tag = f"kelvin:{{jti:{issuer}}}"
        if self._store.is_up:
            try:
                asked = (f"{tag}:since", f"{tag}:{token}")
                return bool(await self._store.ask(SPEND, asked, repr(issued_s), ceil(until_s) + APART_S, KEPT_MS))
            except Away:
                pass
        raise Refused(Unavailable("the memory of one-time tokens"))
