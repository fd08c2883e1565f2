"""A filter policy is read strictly and refused with the rule. A filter's result is applied to the text."""

from typing import Any

import pytest

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import (
    POLICY_FILE,
    EntitySpan,
    FilteredText,
    FilterRule,
    Pii,
    TextResult,
    apply_result,
    read_policy,
    rules_for_direction,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode

PII: dict[str, Any] = {"filter": "pii", "input": {"EMAIL_ADDRESS": "redact"}, "output": {"CREDIT_CARD": "stop"}}
POLICY: dict[str, Any] = {"format": 1, "filters": [PII]}


def test_policy_has_defaults() -> None:
    """Omitted settings have defaults. By default, a failing filter refuses the request."""
    policy = read_policy(encode(POLICY))
    assert (policy.deadline_ms, policy.on_failure) == (500, "refuse")
    assert policy.filters == (Pii(input={"EMAIL_ADDRESS": "redact"}, output={"CREDIT_CARD": "stop"}),)
    assert rules_for_direction(policy, "output") == (FilterRule(filter="pii", actions={"CREDIT_CARD": "stop"}),)
    one_way = read_policy(encode({"format": 1, "filters": [{"filter": "pii", "input": {"US_SSN": "stop"}}]}))
    assert rules_for_direction(one_way, "output") == ()


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        pytest.param(b"{", "truncated", id="no JSON"),
        pytest.param(b"\xff", "", id="no text"),
        pytest.param(encode({"filters": [PII]}), "`format`", id="no format"),
        pytest.param(encode(POLICY | {"format": 2}), "2 - at `$.format`", id="another format"),
        pytest.param(encode(POLICY | {"filter": []}), "unknown field `filter`", id="an unknown field"),
        pytest.param(encode(POLICY | {"filters": []}), "at least one filter", id="no filter"),
        pytest.param(encode(POLICY | {"filters": [PII, PII]}), "'pii' is named twice", id="a filter twice"),
        pytest.param(encode(POLICY | {"filters": [{"filter": "pi"}]}), "'pi' - at `$.filters[0]", id="another filter"),
        pytest.param(encode(POLICY | {"filters": [{"filter": "pii"}]}), "must name an entity", id="no entities"),
        pytest.param(
            encode(POLICY | {"filters": [{"filter": "pii", "input": {"EMAIL": "redact"}}]}),
            "'EMAIL' is not known; must be one of CREDIT_CARD, EMAIL_ADDRESS",
            id="an unknown entity",
        ),
        pytest.param(
            encode(POLICY | {"filters": [PII | {"input": {"US_SSN": "hide"}}]}), "'hide' - at", id="another action"
        ),
        pytest.param(
            encode(POLICY | {"deadline_ms": 5}),
            ">= 10` - at `$.deadline_ms`".replace("`", ""),
            id="a deadline that is too short",
        ),
        pytest.param(encode(POLICY | {"deadline_ms": 60_000}), "<= 5000", id="a deadline that is too long"),
        pytest.param(encode(POLICY | {"on_failure": "ask"}), "'ask' - at `$.on_failure`", id="another behaviour"),
        pytest.param(
            encode(POLICY | {"filters": [PII | {"phone_regions": ["us"]}]}),
            "'us' must be two capital",
            id="an invalid region",
        ),
        pytest.param(
            encode(POLICY | {"filters": [PII | {"phone_regions": ["US"] * 17}]}), "at most 16", id="too many regions"
        ),
    ],
)
def test_a_malformed_policy_is_refused(raw: bytes, rule: str) -> None:
    """The refusal names the file, the value and the rule."""
    with pytest.raises(Refused) as refused:
        read_policy(raw)
    failure = refused.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.param == POLICY_FILE
    assert rule.replace("`", "") in failure.message.replace("`", "")


def _span(start: int, end: int, action: Any = "redact") -> EntitySpan:
    return EntitySpan(start=start, end=end, label="X", action=action)


@pytest.mark.parametrize(
    ("result", "passed"),
    [
        pytest.param(TextResult(decided=6), FilteredText("abcdef"), id="nothing was found"),
        pytest.param(TextResult(decided=2), FilteredText("ab", "cdef"), id="the rest is undecided"),
        pytest.param(
            TextResult(decided=4, spans=(_span(1, 3),)), FilteredText("a<X>d", "ef"), id="something is replaced"
        ),
        pytest.param(
            TextResult(decided=6, spans=(_span(0, 3), _span(3, 6))), FilteredText("<X><X>"), id="one after the other"
        ),
        pytest.param(TextResult(decided=6, spans=(_span(1, 3, "stop"),)), FilteredText("a", stopped="X"), id="a stop"),
    ],
)
def test_filtered_text_splits_into_final_and_pending(result: TextResult, passed: FilteredText) -> None:
    """The decided part is final, with its entities replaced. The rest is filtered again later."""
    assert apply_result("abcdef", result) == passed


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(TextResult(decided=7), id="more than there is"),
        pytest.param(TextResult(decided=-1), id="less than nothing"),
        pytest.param(TextResult(decided=2, spans=(_span(1, 3),)), id="a span that is undecided"),
        pytest.param(TextResult(decided=6, spans=(_span(2, 4), _span(1, 3))), id="spans out of order"),
        pytest.param(TextResult(decided=6, spans=(_span(2, 2),)), id="an empty span"),
    ],
)
def test_contradictory_filter_answer_is_refused(result: TextResult) -> None:
    """A filter response that contradicts itself is refused, and no text is passed on."""
    with pytest.raises(ValueError, match=r"decided|span"):
        apply_result("abcdef", result)
