"""The token limits of a tenant within those of a version."""

import pytest

from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits, parse_token_count


@pytest.mark.parametrize(
    ("ceiling", "prompt_tokens", "want"),
    [
        pytest.param(NO_TOKEN_LIMITS, 10, 50, id="no limit: the version's limit holds"),
        pytest.param(TokenLimits(output_tokens=20), 10, 20, id="a limit of output tokens"),
        pytest.param(TokenLimits(output_tokens=70), 10, 50, id="a limit above the version's"),
        pytest.param(TokenLimits(context_tokens=30), 10, 20, id="a context limit, less the prompt"),
        pytest.param(TokenLimits(30, 5), 10, 5, id="the lower of two limits"),
        pytest.param(TokenLimits(context_tokens=10), 10, 0, id="a prompt that fills the context"),
        pytest.param(TokenLimits(context_tokens=10), 99, 0, id="a prompt larger than the context"),
    ],
)
def test_output_tokens_respect_every_limit(ceiling: TokenLimits, prompt_tokens: int, want: int) -> None:
    """The version allows 50 output tokens."""
    assert ceiling.allowed_output(50, prompt_tokens) == want


def test_headers_hold_only_set_limits() -> None:
    assert list(NO_TOKEN_LIMITS.headers()) == []
    assert dict(TokenLimits(30, 5).headers()) == {"x-kelvin-context-tokens": "30", "x-kelvin-output-tokens": "5"}
    assert dict(TokenLimits(None, 5).headers()) == {"x-kelvin-output-tokens": "5"}
    assert dict(TokenLimits(cap_tokens=7).headers()) == {"x-kelvin-cap-tokens": "7"}


@pytest.mark.parametrize("tokens", [1, MAX_LIMIT])
def test_every_valid_limit_round_trips(tokens: int) -> None:
    """A limit that a replica couldn't read would make it refuse every request of the tenant."""
    assert [parse_token_count(value) for _, value in TokenLimits(tokens, tokens, tokens).headers()] == [tokens] * 3


@pytest.mark.parametrize("written", ["", "-1", "1.5", " 1", "\u0661", str(10 * MAX_LIMIT)])
def test_invalid_limit_header_is_ignored(written: str) -> None:
    """A limit is digits only, and not too many."""
    assert parse_token_count(written) is None
