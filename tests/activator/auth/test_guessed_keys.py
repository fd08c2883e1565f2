"""A hundred thousand guessed keys: none is accepted, memory is bounded, and each guess costs little. Limits don't leak
during these tests, so a delayed guess stays delayed.
"""

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from activator.auth.authenticator import Authenticator
from activator.auth.key_uses import KeyUses
from activator.http.failed_auth_policy import FailedAuthLimiter, FailedAuthLimits
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Scope
from kelvin.ipc.service_client import ServiceClient
from tests.activator.control import KEY, snapshot
from tests.activator.exchanges import exchange

GUESSES = 100_000
LIMITS = FailedAuthLimits(leak_s=1e9, first_s=1e9, longest_s=1e9)
TIMES = 10  # the most that a guess may cost relative to a valid key; about 1.5 as measured


@dataclass
class Flood:
    """Requests with guessed keys, and their outcomes."""

    authenticator: Authenticator
    failed_auth_limiter: FailedAuthLimiter
    codes: Counter[str] = field(default_factory=Counter)
    held: list[Coroutine[object, None, str]] = field(default_factory=list)
    cpu_s: float = 0.0

    async def ask(self, key: str, address: str) -> str:
        """Send one request. Return "in" or the failure's name, and whether its connection is closed."""
        asked = exchange(headers=[(b"authorization", b"Bearer " + key.encode())], address=address)
        try:
            await self.authenticator.authenticate(asked, Scope.INFER)
        except Refused as refused:
            return type(refused.failure).__name__ + (", and it ends" if asked.closes_connection else "")
        return "in"

    def flood(self, count: int, addresses: int, *, key: str | None = None) -> None:
        """Send `count` requests from `addresses` addresses. Keep the delayed ones pending until the end."""
        before_s = time.process_time()
        for number in range(count):
            asked = self.ask(key or f"kv-{number:056}", _address(number % addresses))
            try:
                asked.send(None)
            except StopIteration as told:
                self.codes[told.value] += 1
            else:
                self.held.append(asked)
        self.cpu_s = time.process_time() - before_s

    @property
    def known(self) -> int:
        """Return the number of addresses that the limiter remembers."""
        found = re.search(r"sources=(\d+)", repr(self.failed_auth_limiter))
        assert found is not None
        return int(found[1])


def _address(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


@asynccontextmanager
async def limiter_world(limits: FailedAuthLimits = LIMITS) -> AsyncIterator[Flood]:
    table, failed_auth_limiter = RoutingTable(), FailedAuthLimiter(limits)
    table.apply(snapshot())
    uses = KeyUses(cast(ServiceClient, None))  # reports nothing, because `run` is not started
    flood = Flood(Authenticator(table, uses, failed_auth_limiter=failed_auth_limiter), failed_auth_limiter)
    try:
        yield flood
    finally:
        flood.failed_auth_limiter.check_integrity()
        for asked in flood.held:
            asked.close()
        assert flood.failed_auth_limiter.total_held == 0


async def test_guesses_from_few_addresses_are_held_back() -> None:
    """The first guesses of each address are refused at once, a few are delayed, all others lose their connection. A
    valid key is accepted.
    """

    async with limiter_world() as door:
        door.flood(GUESSES, addresses=100)
        held = min(LIMITS.max_held, 100 * LIMITS.max_held_per_source)
        assert len(door.held) == door.failed_auth_limiter.total_held == held
        ended = GUESSES - 100 * LIMITS.burst - held
        assert door.codes == {"Unauthenticated": 100 * LIMITS.burst, "TooManyFailures, and it ends": ended}
        assert await door.ask(KEY, _address(0)) == "in"


@pytest.mark.parametrize(("limits", "is_bounded"), [
    pytest.param(LIMITS, True, id="bounded"),
    pytest.param(replace(LIMITS, max_sources=1 << 20), False, id="control: no bound"),
])  # fmt: skip
async def test_guesses_from_many_addresses_use_bounded_memory(limits: FailedAuthLimits, is_bounded: bool) -> None:
    """Five guesses from each of 5,000 addresses are refused at once. LIMITS.sources addresses are remembered."""

    async with limiter_world(limits) as door:
        door.flood(25_000, addresses=5000)
        assert door.codes == {"Unauthenticated": 25_000}
        assert (door.known == LIMITS.max_sources) == is_bounded
        assert not door.held


async def test_guessed_key_costs_as_much_as_a_good_one() -> None:
    """Measured in processor time, before any body is read."""

    async with limiter_world() as good, limiter_world() as bad:
        for _ in range(2):  # the first round warms up
            good.flood(10_000, addresses=20_000, key=KEY)
            bad.flood(10_000, addresses=20_000)
        assert good.codes == {"in": 20_000}
        assert bad.cpu_s < TIMES * good.cpu_s
