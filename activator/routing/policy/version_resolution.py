"""Decide which version a request means. Authentication is in `auth/`, waiting is in `queue/`."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import blake2b
from math import log
from typing import Final

from kelvin.contracts.errors import InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.names import DEFAULT_ALIAS, ModelReference, parse_address, qualified_model_name
from kelvin.contracts.serving.control_messages import VersionRow
from kelvin.contracts.serving.degradation_steps import DegradationStep

_RANGE: Final = 1 << 64


class Availability(IntEnum):
    """How soon a version could take one more request; higher is sooner."""

    ASLEEP = 0  # no replica takes requests
    FULL = 1
    ROOM = 2


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model with its aliases, and its versions sorted by digest."""

    tenant: str
    model: str
    aliases: dict[str, str]
    created_at_s: int
    versions: tuple[VersionRow, ...]
    grantees: frozenset[str] = frozenset()  # tenants other than the owner that may call it
    split: Mapping[str, int] = field(default_factory=dict)  # as in `ModelRow`
    ladder: tuple[DegradationStep, ...] = ()  # as in `ModelRow`
    plan_ladders: Mapping[str, tuple[DegradationStep, ...]] = field(default_factory=dict)  # as in `ModelRow`
    backlog_s: float = 0.0  # as in `ModelRow`
    meanwhile: Mapping[str, str] = field(default_factory=dict)  # as in `ModelRow`

    def name_for(self, caller: str) -> str:
        """Return the name that the caller uses for it. API keys, records and lists use this name."""
        return qualified_model_name(caller, self.tenant, self.model)

    def steps_for_plan(self, plan: str | None) -> tuple[DegradationStep, ...]:
        """Return the degradation steps for a tenant of that plan."""
        return self.ladder if plan is None else self.plan_ladders.get(plan, self.ladder)


def merge_references(in_url: str | None, in_body: str | None) -> ModelReference:
    """Return the reference on which URL and body agree. One that names an alias or version wins over the bare model.
    Raises Refused(InvalidRequest) if they disagree, if neither names a model, or for a malformed name.
    """
    if in_url is None and in_body is None:
        raise Refused(InvalidRequest("model", "(missing)", "name a model"))
    if in_url is None or in_body is None or in_url == in_body:
        return parse_address(in_body if in_url is None else in_url)  # type: ignore[arg-type]
    url, body = parse_address(in_url), parse_address(in_body)
    if url.model == body.model:
        named = replace(url, owner=body.owner)  # the URL has the tenant in its path, not in the name
        if "@" not in in_url or named == body:
            return body
        if "@" not in in_body:
            return named
    raise Refused(InvalidRequest("model", repr(in_body[:80]), f"the URL names '{in_url}'"))


def resolve_version(reference: ModelReference, entry: ModelEntry, split_key: str | None = None) -> VersionRow:
    """Return the version that the reference means for `split_key`. Raises Refused(ModelNotFound), or
    Refused(InvalidRequest) for a prefix that fits several versions.
    """
    if reference.alias is not None:
        if entry.split and split_key is not None and reference.alias == DEFAULT_ALIAS:
            row = find_version(entry, assign_version(entry.split, split_key))
            if row is not None:
                return row
        version = entry.aliases.get(reference.alias)
        row = None if version is None else find_version(entry, version)
    else:
        row = _by_prefix(entry, reference)
    if row is None:
        raise Refused(ModelNotFound(str(reference)))
    return row


def choose_version(
    row: VersionRow, entry: ModelEntry, availability: Callable[[VersionRow], Availability]
) -> VersionRow:
    """Return the version that answers. In the first minutes after a deploy, that is the previous version if it has more
    capacity free. In a tie it is the new version, so that it is scaled up.
    """
    before = entry.meanwhile.get(row.version)
    other = None if before is None else find_version(entry, before)
    return other if other is not None and other.kind == row.kind and availability(other) > availability(row) else row


def find_version(entry: ModelEntry, version: str) -> VersionRow | None:
    """Return the version with exactly this digest, or None."""
    at = bisect_left(entry.versions, version, key=lambda row: row.version)
    if at < len(entry.versions) and entry.versions[at].version == version:
        return entry.versions[at]
    return None


def _by_prefix(entry: ModelEntry, reference: ModelReference) -> VersionRow | None:
    prefix = reference.version_prefix or ""
    at = bisect_left(entry.versions, prefix, key=lambda row: row.version)
    fitting = [row for row in entry.versions[at : at + 2] if row.version.startswith(prefix)]
    if len(fitting) > 1:
        raise Refused(InvalidRequest("model", f"'{reference}'", "fits several versions; give more digits"))
    return fitting[0] if fitting else None


def assign_version(weights: Mapping[str, int], split_key: str) -> str:
    """Return the version that a split assigns to `split_key`. The same key always gets the same version.

    Weighted rendezvous hashing (Thaler and Ravishankar, 1996; weights by Schindelhauer and Schomaker, 2005): the key
    goes to the version with the highest score. A version whose weight grows takes keys from the others and loses none.
    So a split that is shifted step by step moves no key back and forth. There is at least one version, and weights are
    at least 1. Ties are broken by name.
    """
    return max(weights, key=lambda version: (_score(version, weights[version], split_key), version))


def _score(version: str, weight: int, split_key: str) -> float:
    drawn = int.from_bytes(blake2b(f"{version} {split_key}".encode(), digest_size=8).digest())
    return -weight / log((drawn + 0.5) / _RANGE)
