"""Token limits of a caller's tenant, sent to the replica, which counts tokens. Pure.

Each limit is sent as a header, if it exists. A request beyond a limit is refused. A response beyond a cap, which a
degradation step sets, is cut short.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.numbers import MAX_LIMIT, parse_whole_number

CONTEXT_TOKENS_HEADER: Final = "x-kelvin-context-tokens"
OUTPUT_TOKENS_HEADER: Final = "x-kelvin-output-tokens"
CAP_TOKENS_HEADER: Final = "x-kelvin-cap-tokens"
TENANT_PHRASE: Final = "your tenant"


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Highest numbers of tokens. None: as many as the version allows."""

    context_tokens: int | None = None  # prompt and response together; 2 or more
    output_tokens: int | None = None
    cap_tokens: int | None = None  # cap of a response, whatever the request asks for

    def allowed_output(self, requested: int, prompt_tokens: int = 1) -> int:
        """Return how many of the `requested` tokens the limits allow after a prompt of `prompt_tokens`; 0 if none."""
        if self.output_tokens is not None:
            requested = min(requested, self.output_tokens)
        return requested if self.context_tokens is None else max(0, min(requested, self.context_tokens - prompt_tokens))

    def apply_cap(self, tokens: int) -> int:
        """Return `tokens`, at most the cap."""
        return tokens if self.cap_tokens is None else min(tokens, self.cap_tokens)

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield the headers for the replica."""
        if self.context_tokens is not None:
            yield CONTEXT_TOKENS_HEADER, str(self.context_tokens)
        if self.output_tokens is not None:
            yield OUTPUT_TOKENS_HEADER, str(self.output_tokens)
        if self.cap_tokens is not None:
            yield CAP_TOKENS_HEADER, str(self.cap_tokens)


NO_TOKEN_LIMITS: Final = TokenLimits()


def parse_token_count(value: str) -> int | None:
    """Return the number in one of these headers, or None if it is invalid."""
    return parse_whole_number(value, len(str(MAX_LIMIT)))
