"""What a tenant has spent of its month's budget, by the ledger, and what requests cost: told to activators. Pure.

Money is integer micro-units of the price book's currency.
"""

import msgspec

from kelvin.contracts.wire import Fact


class TokenPrices(Fact, frozen=True):
    """Micro-units per `per_tokens` tokens, and per request."""

    per_tokens: int
    prompt: int
    cached: int
    completion: int
    request: int

    def cost_micros(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Of one request, rounded up; `prompt_tokens` include the cached ones."""
        fresh = prompt_tokens - cached_tokens
        tokens = fresh * self.prompt + cached_tokens * self.cached + completion_tokens * self.completion
        return self.request - -tokens // self.per_tokens


class SpendingRow(Fact, frozen=True):
    """Of a tenant that has a budget: the bill of a month as it stands, and which records are in it."""

    tenant: str
    month: str  # YYYY-MM (UTC)
    ends_at_us: int  # when it does, microseconds since 1970
    spent_micros: int
    prices: TokenPrices  # now
    seen: dict[str, int]  # of each spool that told of requests lately, up to which sequence they are in it
    # On the first and the last day of a month also the bill of the month before or after it, by month: clocks differ,
    # and a record counts in the month that it was in by its writer's clock.
    beside: dict[str, int] = msgspec.field(default_factory=dict)
