"""Filters of prompts and responses: the policy that a version pins, and the messages between runtime and filter
process.

Pure. The runtime sends the requests (`runtime/surface/filter_pipeline.py`); the process in `kelvin/filters` answers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, Wire, decoder

POLICY_FILE: Final = "kelvin-filters.json"  # in the pushed directory
FILTERS_SOCKET: Final = "filters.sock"
CHECK_PATH: Final = "/v1/check"
# Milliseconds that the runtime still waits. A header, because a filter process of an older build refuses new fields.
DEADLINE_HEADER: Final = "x-kelvin-deadline-ms"
TENANT_HEADER: Final = "x-kelvin-tenant"  # the fair queue's key; a header for the same reason
# presidio's names, so that people who know presidio can read a policy.
ENTITIES: Final = ("CREDIT_CARD", "EMAIL_ADDRESS", "IBAN_CODE", "IP_ADDRESS", "PHONE_NUMBER", "US_SSN")
MAX_REGIONS: Final = 16
_REGION: Final = re.compile(r"[A-Z]{2}")

Action = Literal["redact", "stop"]
Direction = Literal["input", "output"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("input", "output")


class Pii(Wire, frozen=True, tag_field="filter", tag="pii"):
    """Personal data. Entities that a direction does not list pass.

    Without `phone_regions`, only phone numbers with a country code are found.
    """

    input: dict[str, Action] = msgspec.field(default_factory=dict)
    output: dict[str, Action] = msgspec.field(default_factory=dict)
    phone_regions: tuple[str, ...] = ()


class FilterPolicy(Wire, frozen=True):
    """A version's filters. `deadline_ms` limits one request to the filter process.

    `on_failure` says whether text that was not checked in time is refused or allowed.
    """

    format: Literal[1]
    filters: tuple[Pii, ...]
    deadline_ms: Annotated[int, msgspec.Meta(ge=10, le=5000)] = 500
    on_failure: Literal["refuse", "allow"] = "refuse"


class FilterRule(Wire, frozen=True):
    """A filter as applied in one direction."""

    filter: Literal["pii"]
    actions: dict[str, Action]
    phone_regions: tuple[str, ...] = ()


class FilterRequest(Wire, frozen=True):
    """Texts to check. Unless they are `whole`, each text may continue in a later request.

    `unseen` counts texts that passed unchecked since the runtime's last request, where policies allow that. The filter
    process shows the sum in its metrics.
    """

    direction: Direction
    rules: tuple[FilterRule, ...]
    texts: tuple[str, ...]
    whole: bool
    unseen: Annotated[int, msgspec.Meta(ge=0)] = 0


class EntitySpan(Wire, frozen=True):
    """A finding: characters `start` to `end` of a text."""

    start: int
    end: int
    label: str
    action: Action


class TextResult(Wire, frozen=True):
    """The result for one text. Text before `decided` is final, whatever follows. `spans` are ordered, before it."""

    decided: int
    spans: tuple[EntitySpan, ...] = ()


class FilterResponse(Wire, frozen=True):
    """One result for each text of the request, in the same order."""

    looked: tuple[TextResult, ...]


@dataclass(frozen=True, slots=True)
class FilteredText:
    """`text` may be passed on; `pending_text` must be checked again. `stopped` is the label that ended the text, if
    any. `unfiltered`: no filter checked the text, and the policy allows that.
    """

    text: str
    pending_text: str = ""
    stopped: str | None = None
    unfiltered: bool = False


def read_policy(raw: bytes) -> FilterPolicy:
    """Decode a policy strictly. Raises `Refused(ArtifactRejected)` with the file, the value and the rule."""
    try:
        policy = decoder(FilterPolicy).decode(raw)
    except BadJson as error:
        raise Refused(ArtifactRejected(POLICY_FILE, str(error))) from error
    names = [_name(each) for each in policy.filters]
    if not names:
        raise Refused(ArtifactRejected(POLICY_FILE, "filters=[]: must name at least one filter"))
    for repeated in (name for name in names if names.count(name) > 1):
        raise Refused(ArtifactRejected(POLICY_FILE, f"filters: {repeated!r} is named twice"))
    for each in policy.filters:
        _check_pii(each)
    return policy


def rules_for_direction(policy: FilterPolicy, direction: Direction) -> tuple[FilterRule, ...]:
    """Return the rules that apply in one direction, possibly none."""
    found = []
    for each in policy.filters:
        actions = each.input if direction == "input" else each.output
        if actions:
            found.append(FilterRule(filter="pii", actions=actions, phone_regions=each.phone_regions))
    return tuple(found)


def apply_result(text: str, looked: TextResult) -> FilteredText:
    """Return the decided text with each finding replaced by its label. Raises ValueError for a result that contradicts
    itself.
    """
    if not 0 <= looked.decided <= len(text):
        raise ValueError(f"{looked.decided} of {len(text)} characters are decided")
    parts, at = [], 0
    for span in looked.spans:
        if not at <= span.start < span.end <= looked.decided:
            raise ValueError(f"a span from {span.start} to {span.end} after {at} of {looked.decided}")
        parts.append(text[at : span.start])
        if span.action == "stop":
            return FilteredText("".join(parts), stopped=span.label)
        parts.append(f"<{span.label}>")
        at = span.end
    parts.append(text[at : looked.decided])
    return FilteredText("".join(parts), text[looked.decided :])


def _name(pii: Pii) -> str:
    return str(pii.__struct_config__.tag)


def _check_pii(pii: Pii) -> None:
    actions_by_direction: Mapping[str, Mapping[str, Action]] = {"input": pii.input, "output": pii.output}
    for direction, actions in actions_by_direction.items():
        for entity in actions:
            if entity not in ENTITIES:
                rule = f"{direction}: {entity[:40]!r} is not known; must be one of {', '.join(ENTITIES)}"
                raise Refused(ArtifactRejected(POLICY_FILE, rule))
    if not pii.input and not pii.output:
        raise Refused(ArtifactRejected(POLICY_FILE, "pii: must name an entity in input or output"))
    if len(pii.phone_regions) > MAX_REGIONS:
        rule = f"phone_regions: has {len(pii.phone_regions)}; at most {MAX_REGIONS} are allowed"
        raise Refused(ArtifactRejected(POLICY_FILE, rule))
    for region in pii.phone_regions:
        if _REGION.fullmatch(region) is None:
            rule = f"phone_regions: {region[:40]!r} must be two capital letters (ISO 3166)"
            raise Refused(ArtifactRejected(POLICY_FILE, rule))
