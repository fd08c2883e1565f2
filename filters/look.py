"""Look at a text: segment by segment, each by every rule. The same for any pieces in which a text comes."""

from collections.abc import Generator, Sequence
from typing import Final

from contracts.filters import Looked, Rule, Span
from filters import pii
from filters.policy.folding import fold, without_invisible
from filters.policy.overlaps import settle
from filters.policy.segments import is_plain, next_segment

_PLAIN_SEGMENTS: Final = 256


def look(text: str, rules: Sequence[Rule], whole: bool) -> Looked:
    """Return what was found as far as the text is decided. Ends with the first span that stops: what follows is
    nobody's.
    """
    steps = look_in_steps(text, rules, whole)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Looked = end.value
            return found


def look_in_steps(text: str, rules: Sequence[Rule], whole: bool) -> Generator[None, None, Looked]:
    """Look as `look` does, and yield after each step of some milliseconds, so that scans can share a thread.

    A step is one pattern over one segment, or _PLAIN_SEGMENTS segments that hold nothing to look for.
    """
    folded = fold(text)
    at, plain, spans = 0, 0, list[Span]()
    while True:
        segment = next_segment(folded, at, whole)
        if isinstance(segment, int):
            return Looked(decided=segment, spans=tuple(spans))
        part = folded[segment.start : segment.end]
        if is_plain(part):
            at, plain = segment.final, plain + 1
            if plain % _PLAIN_SEGMENTS == 0:
                yield
            continue
        found = yield from _find(part, rules)
        mine = [span for span in found if segment.start + span.start < segment.final]
        spans += [_moved(span, segment.start) for span in mine]
        at = max(segment.final, spans[-1].end) if mine else segment.final
        if mine and mine[-1].action == "stop":
            return Looked(decided=at, spans=tuple(spans))


def _find(folded: str, rules: Sequence[Rule]) -> Generator[None, None, list[Span]]:
    visible, places = without_invisible(folded)
    found = []
    for rule in rules:
        for finder in pii.finders(rule):
            found += finder(visible)
            yield
    settled = settle(found)
    return settled if places is None else [_as_written(span, places) for span in settled]


def _as_written(span: Span, places: Sequence[int]) -> Span:
    return Span(start=places[span.start], end=places[span.end - 1] + 1, label=span.label, action=span.action)


def _moved(span: Span, by: int) -> Span:
    return Span(start=span.start + by, end=span.end + by, label=span.label, action=span.action)
