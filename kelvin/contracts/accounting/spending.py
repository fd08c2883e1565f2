"""Spending of a tenant in its month, and prices of requests. The control plane sends both to activators. Pure.

Money is integer micro-units of the price book's currency.
"""

import msgspec

from kelvin.contracts.wire import Fact


class TokenPrices(Fact, frozen=True):
    """Prices in micro-units: per `per_tokens` tokens, and per request."""

    per_tokens: int
    prompt: int
    cached: int
    completion: int
    request: int

    def cost_micros(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Return the cost of one request, rounded up. `prompt_tokens` includes the cached tokens."""
        fresh = prompt_tokens - cached_tokens
        tokens = fresh * self.prompt + cached_tokens * self.cached + completion_tokens * self.completion
        return self.request - -tokens // self.per_tokens


class SpendingRow(Fact, frozen=True):
    """The current bill of a tenant that has a budget, and which records the bill includes."""

    tenant: str
    month: str  # YYYY-MM (UTC)
    ends_at_us: int  # end of the month, microseconds since 1970
    spent_micros: int
    prices: TokenPrices  # current prices
    # The last sequence number that the bill includes, by spool. Lists spools that sent request records recently.
    seen: dict[str, int]
    # Bills of the adjacent month, by month; filled on the first and last day of a month. Clocks differ, and a record
    # counts in the month that its writer's clock showed.
    beside: dict[str, int] = msgspec.field(default_factory=dict)
