"""Overlapping spans are merged into one, with the stricter action."""

import pytest

from kelvin.contracts.artifacts.filter_api import Action, EntitySpan
from kelvin.filters.segmentation_policy import merge_spans


def _span(start: int, end: int, label: str, action: Action = "redact") -> EntitySpan:
    return EntitySpan(start=start, end=end, label=label, action=action)


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param([_span(5, 7, "B"), _span(0, 2, "A")], [_span(0, 2, "A"), _span(5, 7, "B")], id="spans are sorted"),
        pytest.param([_span(0, 2, "A"), _span(2, 4, "B")], [_span(0, 2, "A"), _span(2, 4, "B")], id="neighbours"),
        pytest.param([_span(0, 3, "A"), _span(1, 9, "B")], [_span(0, 9, "B")], id="the longest names all of it"),
        pytest.param(
            [_span(0, 9, "A"), _span(1, 3, "B", "stop")], [_span(0, 9, "B", "stop")], id="a part stops all of it"
        ),
        pytest.param(
            [_span(0, 2, "A", "stop"), _span(5, 7, "B")], [_span(0, 2, "A", "stop")], id="nothing after a stop"
        ),
        pytest.param([_span(0, 4, "A"), _span(3, 6, "B"), _span(5, 8, "C")], [_span(0, 8, "A")], id="a chain is one"),
    ],
)
def test_merge_spans(found: list[EntitySpan], want: list[EntitySpan]) -> None:
    """The result doesn't depend on the order of the spans."""
    assert merge_spans(found) == want
    assert merge_spans(found[::-1]) == want
