"""Find personal data in a text, by patterns and checksums. No language model, no network.

A text is scanned segment by segment (see `segmentation_policy.py`), each with every rule. So the pieces in which a text
arrives make no difference. `phonenumbers` validates telephone numbers. `python-stdnum` validates checksums of cards,
IBANs and social security numbers. The standard library validates IP addresses. Entity names are presidio's.
"""

import ipaddress
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import phonenumbers
from stdnum import iban, luhn
from stdnum.us import ssn

from kelvin.contracts.artifacts.filter_api import Action, EntitySpan, FilterRule, TextResult
from kelvin.filters.segmentation_policy import fold, is_plain, merge_spans, next_segment, without_invisible

Offsets = tuple[int, int]

_PLAIN_SEGMENTS: Final = 256

_LETTER: Final = r"A-Za-z\u00c0-\u024f\u0370-\u052f"
# The HTML standard's e-mail address with letters beyond ASCII, and a top level domain of letters.
_EMAIL: Final = re.compile(
    f"[{_LETTER}0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@"
    f"(?:[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,61}}[{_LETTER}0-9])?\\.){{1,20}}[{_LETTER}]{{2,63}}"
)
_GROUP: Final = re.compile(r"[0-9]+")
_CARD_LENGTHS: Final = range(12, 20)  # ISO/IEC 7812
_CARD_BEGINS: Final = "23456"  # first digits of payment cards
_CARD_SEPARATORS: Final = frozenset({" ", "  ", "-", " - ", "."})
_SSN: Final = re.compile(
    r"(?<![0-9A-Za-z.-])(?<![0-9] )([0-9]{3})([-. ])([0-9]{2})\2([0-9]{4})(?![0-9A-Za-z]|[-. ][0-9])"
)
_IBAN: Final = re.compile(r"(?<![0-9A-Za-z])[A-Z]{2}[0-9]{2}(?:[ -]?[0-9A-Z]){11,30}")
_CAPITALS: Final = {small: small - 32 for small in range(ord("a"), ord("z") + 1)}
_IBAN_LENGTHS: Final = range(15, 35)  # ISO 13616
_ADDRESS: Final = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f.]{0,15}){2,8})(?!\w)"
)


def _emails(text: str) -> Iterator[Offsets]:
    if "@" in text:
        yield from (found.span() for found in _EMAIL.finditer(text))


def _cards(text: str) -> Iterator[Offsets]:
    """Yield the longest digit groups with a card's length and check digit, separated by spaces, a hyphen or a dot."""
    groups = [found.span() for found in _GROUP.finditer(text)]
    at = 0
    while at < len(groups):
        last = _longest_card(text, groups, at)
        if last is not None:
            yield groups[at][0], groups[last][1]
        at = at + 1 if last is None else last + 1


def _longest_card(text: str, groups: list[Offsets], first: int) -> int | None:
    """Return the last group of the longest card that begins with group `first`, or None."""
    start = groups[first][0]
    if text[start] not in _CARD_BEGINS or (start and text[start - 1].isalpha()):
        return None
    digits, longest, is_dotted = "", None, False
    for at in range(first, len(groups)):
        begin, end = groups[at]
        between = text[groups[at - 1][1] : begin] if at > first else " "
        if between not in _CARD_SEPARATORS:
            break
        is_dotted = is_dotted or between == "."
        digits += text[begin:end]
        if len(digits) >= _CARD_LENGTHS.stop:
            break
        if is_dotted and not _is_grouped(groups[first : at + 1]):
            continue
        if len(digits) in _CARD_LENGTHS and not text[end : end + 1].isalpha() and luhn.is_valid(digits):
            longest = at
    return longest


def _is_grouped(groups: list[Offsets]) -> bool:
    """Return whether digits are grouped as on a card. Otherwise any number with a dot, such as pi, might be one."""
    return len(groups) > 2 and all(end - start in range(3, 7) for start, end in groups)


def _ssns(text: str) -> Iterator[Offsets]:
    yield from (found.span() for found in _SSN.finditer(text) if ssn.is_valid("-".join(found.group(1, 3, 4))))


def _ibans(text: str) -> Iterator[Offsets]:
    text, at = text.translate(_CAPITALS), 0
    while (found := _IBAN.search(text, at)) is not None:
        places = [index for index in range(*found.span()) if text[index] not in " -"]
        at = found.start() + 4
        for length in reversed(_IBAN_LENGTHS):
            if length > len(places) or text[(end := places[length - 1] + 1) : end + 1].isalnum():
                continue
            if iban.is_valid("".join(text[index] for index in places[:length])):
                yield found.start(), end
                at = end
                break


def _addresses(text: str) -> Iterator[Offsets]:
    for found in _ADDRESS.finditer(text):
        shown = found[0].rstrip(".:") if not found[0].endswith("::") else found[0]
        try:
            address = ipaddress.ip_address(shown)
        except ValueError:
            continue
        if not address.is_unspecified:
            yield found.start(), found.start() + len(shown)


_FINDERS: Final[Mapping[str, Callable[[str], Iterator[Offsets]]]] = {
    "CREDIT_CARD": _cards,
    "EMAIL_ADDRESS": _emails,
    "IBAN_CODE": _ibans,
    "IP_ADDRESS": _addresses,
    "US_SSN": _ssns,
}
_PHONE: Final = "PHONE_NUMBER"


def unknown_region(rule: FilterRule) -> str | None:
    """Return the first region of the rule that has no known phone numbers, or None."""
    return next((region for region in rule.phone_regions if region not in phonenumbers.SUPPORTED_REGIONS), None)


def build_finders(rule: FilterRule) -> Iterator[Callable[[str], list[EntitySpan]]]:
    """Yield a finder for each entity. Phone numbers come last, with one finder per region, because they match too much.
    A finder takes a folded text without invisible characters. Findings may overlap.
    """
    for entity in sorted(rule.actions, key=lambda entity: (entity == _PHONE, entity)):
        action = rule.actions[entity]
        if entity == _PHONE:
            for region in (None, *rule.phone_regions):
                yield partial(_spans, entity, action, partial(_phones, region))
        else:
            yield partial(_spans, entity, action, _FINDERS[entity])


def _spans(entity: str, action: Action, finder: Callable[[str], Iterable[Offsets]], text: str) -> list[EntitySpan]:
    return [EntitySpan(start=start, end=end, label=entity, action=action) for start, end in finder(text)]


def _phones(region: str | None, text: str) -> Iterator[Offsets]:
    for match in phonenumbers.PhoneNumberMatcher(text, region):
        yield match.start, match.end


def scan_text(text: str, rules: Sequence[FilterRule], whole: bool) -> TextResult:
    """Return the findings in the decided part of the text. Ends with the first span that stops."""
    steps = scan_steps(text, rules, whole)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: TextResult = end.value
            return found


def scan_steps(text: str, rules: Sequence[FilterRule], whole: bool) -> Generator[None, None, TextResult]:
    """Scan as `scan_text` does, and yield after each step of a few milliseconds, so that scans can share a thread. A
    step is one pattern over one segment, or _PLAIN_SEGMENTS segments that no pattern can match.
    """
    folded = fold(text)
    at, plain, spans = 0, 0, list[EntitySpan]()
    while True:
        segment = next_segment(folded, at, whole)
        if isinstance(segment, int):
            return TextResult(decided=segment, spans=tuple(spans))
        part = folded[segment.start : segment.end]
        if is_plain(part):
            at, plain = segment.final, plain + 1
            if plain % _PLAIN_SEGMENTS == 0:
                yield
            continue
        found = yield from _scan_segment(part, rules)
        own_spans = [span for span in found if segment.start + span.start < segment.final]
        spans += [_shift(span, segment.start) for span in own_spans]
        at = max(segment.final, spans[-1].end) if own_spans else segment.final
        if own_spans and own_spans[-1].action == "stop":
            return TextResult(decided=at, spans=tuple(spans))


def _scan_segment(folded: str, rules: Sequence[FilterRule]) -> Generator[None, None, list[EntitySpan]]:
    visible, places = without_invisible(folded)
    found = []
    for rule in rules:
        for finder in build_finders(rule):
            found += finder(visible)
            yield
    settled = merge_spans(found)
    return settled if places is None else [_original_span(span, places) for span in settled]


def _original_span(span: EntitySpan, places: Sequence[int]) -> EntitySpan:
    return EntitySpan(start=places[span.start], end=places[span.end - 1] + 1, label=span.label, action=span.action)


def _shift(span: EntitySpan, by: int) -> EntitySpan:
    return EntitySpan(start=span.start + by, end=span.end + by, label=span.label, action=span.action)
