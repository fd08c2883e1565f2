"""Look at a text: segment by segment, each by every rule. The same for any pieces in which a text comes."""

from collections.abc import Callable, Sequence

from contracts.filters import Looked, Rule, Span
from filters import pii
from filters.policy.overlaps import settle
from filters.policy.segments import is_plain, next_segment


def look(text: str, rules: Sequence[Rule], whole: bool, check: Callable[[], None] = lambda: None) -> Looked:
    """What was found as far as the text is decided. Ends with the first span that stops: what follows is nobody's.
    `check` is called before each segment, for who may have looked long enough: what it raises ends it.
    """
    at, spans = 0, list[Span]()
    while True:
        check()
        segment = next_segment(text, at, whole)
        if isinstance(segment, int):
            return Looked(decided=segment, spans=tuple(spans))
        found = _find(text[segment.start : segment.end], rules)
        mine = [span for span in found if segment.start + span.start < segment.final]
        spans += [_moved(span, segment.start) for span in mine]
        at = max(segment.final, spans[-1].end) if mine else segment.final
        if mine and mine[-1].action == "stop":
            return Looked(decided=at, spans=tuple(spans))


def _find(text: str, rules: Sequence[Rule]) -> list[Span]:
    if is_plain(text):
        return []
    return settle([span for rule in rules for span in pii.find(text, rule)])


def _moved(span: Span, by: int) -> Span:
    return Span(start=span.start + by, end=span.end + by, label=span.label, action=span.action)
