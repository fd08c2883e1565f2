"""Spans that lie across one another become one. Pure."""

from collections.abc import Iterable

from contracts.filters import Span


def settle(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, overlapping ones joined into one. The result ends with the first span that stops.

    A joined span has the label of the longest of its spans. If one of them stops, it stops, and has that one's label.
    """
    settled: list[Span] = []
    longest = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.end, span.action != "stop")):
        if settled and span.start < settled[-1].end:
            settled[-1], longest = _joined(settled[-1], span, longest)
            continue
        if settled and settled[-1].action == "stop":
            break
        settled.append(span)
        longest = span.end - span.start
    return settled


def _joined(one: Span, other: Span, longest: int) -> tuple[Span, int]:
    length = other.end - other.start
    stops = "stop" in (one.action, other.action)
    if one.action != other.action:
        label = one.label if one.action == "stop" else other.label
    else:
        label = other.label if length > longest else one.label
    return Span(start=one.start, end=max(one.end, other.end), label=label, action="stop" if stops else "redact"), max(
        longest, length
    )
