"""Decide which of a tenant's objects are needed, and which may be freed. Pure: `collector.py` lists and deletes.

An object is needed if a model names its version, if a running commit or an open push relies on it, or if it has been
unneeded for less than the grace period. All other objects are freed, as a whole: one needed chunk keeps its pack.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kelvin.contracts.artifact_errors import ManifestCorrupt, ManifestMissing
from kelvin.contracts.artifacts.object_keys import condemned_key, draft_key, index_key, manifest_key, pack_key
from kelvin.contracts.artifacts.push_api import Condemned, Freed
from kelvin.contracts.errors import Refused


@dataclass(frozen=True, slots=True)
class ListedObject:
    """A listed object: its size, and when it was stored (wall clock)."""

    nbytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class ListedManifest:
    """A manifest or draft. `chunks` is None if it does not decode."""

    object: ListedObject
    chunks: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class ListedPack:
    """A pack with the chunks (digest -> length) in its index or footer; None if neither can be read."""

    object: ListedObject
    chunks: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class AuxiliaryObject:
    """An attestation, a pack list or an inputs object: its key, and the version that it belongs to."""

    key: str
    object: ListedObject
    version: str


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """All objects of a tenant, and their users. Mappings are by version or pack."""

    tenant: str
    named: frozenset[str]  # versions that a model names
    committing: frozenset[str]  # versions whose commit runs
    declared_digests: frozenset[str]  # chunks that open pushes and running commits rely on
    pending_versions: frozenset[str]  # versions that open pushes make; their attestations exist before them
    manifests: Mapping[str, ListedManifest]
    drafts: Mapping[str, ListedManifest]
    condemned: Mapping[str, ListedObject]
    attestations: tuple[AuxiliaryObject, ...]
    inputs: tuple[AuxiliaryObject, ...]
    packs: Mapping[str, ListedPack]
    indexes: Mapping[str, ListedObject]
    pack_lists: tuple[AuxiliaryObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Collection:
    """The decisions: mark, unmark, and free in this order. Everything else stays."""

    condemn: tuple[str, ...]  # versions to mark now
    unmark: tuple[str, ...]  # versions to unmark, because a model names them again
    condemned: tuple[Condemned, ...]
    free: tuple[Freed, ...]
    versions: int
    packs: int
    unreferenced_bytes: int
    lost: int  # needed chunks that no known pack holds; if there are any, no pack is freed


def plan_collection(facts: StoreFacts, now_s: float, grace_s: float) -> Collection:
    """Choose what a collection frees, marks and unmarks.

    If no known pack holds a needed chunk, the table of some unknown pack is missing or wrong, so no pack is freed.
    Raises `Refused` (ManifestCorrupt, ManifestMissing) if the manifest of a needed version can't be used.
    """
    used_versions = facts.named | facts.committing
    unnamed = sorted(facts.manifests.keys() - used_versions)
    condemned_at_s = {version: facts.condemned[version].modified_s for version in unnamed if version in facts.condemned}
    left_s = {version: condemned_at_s.get(version, now_s) + grace_s - now_s for version in unnamed}
    expired = {version for version in unnamed if left_s[version] <= 0}
    kept = facts.manifests.keys() - expired
    kept_drafts = {
        version
        for version, draft in facts.drafts.items()
        if version in facts.committing or _is_young(draft.object, now_s, grace_s)
    }
    live = kept | kept_drafts | facts.committing
    gone = (expired | facts.drafts.keys()) - live
    needed = _needed_chunks(facts, kept, kept_drafts)
    reached = needed | facts.declared_digests
    lost = needed - {digest for pack in facts.packs.values() for digest in pack.chunks or ()}
    free = (
        *_auxiliary_to_free(facts.inputs, live, gone, now_s, grace_s),
        *(_freed(manifest_key, facts, v, facts.manifests[v].object, "no model names it") for v in sorted(expired)),
        *_auxiliary_to_free(facts.attestations, live | facts.pending_versions, gone, now_s, grace_s),
        *_auxiliary_to_free(facts.pack_lists, live, gone, now_s, grace_s),
        # Free a draft after the objects made from it: if the collection ends here, none may refer to a missing draft.
        # Free a manifest before its attestations, because it must not exist without them.
        *(
            _freed(draft_key, facts, version, facts.drafts[version].object, "its push did not end")
            for version in sorted(facts.drafts.keys() - kept_drafts)
        ),
        *(
            _freed(condemned_key, facts, version, mark, "its version is gone")
            for version, mark in sorted(facts.condemned.items())
            if version not in kept
        ),
        *(() if lost else _packs_to_free(facts, reached, now_s, grace_s)),
    )
    freed_keys = {freed.key for freed in free}
    kept_packs = {pack: found for pack, found in facts.packs.items() if pack_key(facts.tenant, pack) not in freed_keys}
    lengths = {digest: length for found in kept_packs.values() for digest, length in (found.chunks or {}).items()}
    return Collection(
        condemn=tuple(version for version in unnamed if version not in condemned_at_s and version not in expired),
        unmark=tuple(sorted(facts.condemned.keys() & used_versions & facts.manifests.keys())),
        condemned=tuple(Condemned(version=v, kept_s=max(0, round(left_s[v]))) for v in unnamed if v not in expired),
        free=free,
        versions=len(kept),
        packs=len(kept_packs),
        unreferenced_bytes=sum(length for digest, length in lengths.items() if digest not in reached),
        lost=len(lost),
    )


def _needed_chunks(facts: StoreFacts, kept: Iterable[str], drafts: Iterable[str]) -> frozenset[str]:
    """Return the chunks of the versions and drafts that stay. Raises as `plan_collection` does."""
    for version in sorted(facts.named):
        if version not in facts.manifests:
            raise Refused(ManifestMissing(version))
    needed: set[str] = set()
    for objects, versions in ((facts.manifests, kept), (facts.drafts, drafts)):
        for version in versions:
            chunks = objects[version].chunks
            if chunks is None:
                raise Refused(ManifestCorrupt(version, "it does not decode, so its chunks are unknown"))
            needed |= chunks
    return frozenset(needed)


def _packs_to_free(facts: StoreFacts, reached: frozenset[str], now_s: float, grace_s: float) -> Iterator[Freed]:
    """Yield packs to free, each after its index. Readers are never offered a pack without an index, but they would be
    offered an index without its pack.
    """
    for pack, found in sorted(facts.packs.items()):
        if found.chunks is None or not reached.isdisjoint(found.chunks) or _is_young(found.object, now_s, grace_s):
            continue
        if (index := facts.indexes.get(pack)) is not None:
            yield _freed(index_key, facts, pack, index, "no version needs its pack")
        yield _freed(pack_key, facts, pack, found.object, "no version needs a chunk of it")
    for pack, index in sorted(facts.indexes.items()):
        if pack not in facts.packs and not _is_young(index, now_s, grace_s):
            yield _freed(index_key, facts, pack, index, "its pack is gone")


def _auxiliary_to_free(
    auxiliaries: Iterable[AuxiliaryObject], live: AbstractSet[str], gone: AbstractSet[str], now_s: float, grace_s: float
) -> Iterator[Freed]:
    """Yield objects whose version is gone. Young ones stay, unless their version or draft is in `gone`."""
    for auxiliary in auxiliaries:
        is_old = auxiliary.version in gone or not _is_young(auxiliary.object, now_s, grace_s)
        if auxiliary.version not in live and is_old:
            yield Freed(key=auxiliary.key, nbytes=auxiliary.object.nbytes, reason="its version is gone")


def _freed(key: Callable[[str, str], str], facts: StoreFacts, name: str, found: ListedObject, reason: str) -> Freed:
    return Freed(key=key(facts.tenant, name), nbytes=found.nbytes, reason=reason)


def _is_young(found: ListedObject, now_s: float, grace_s: float) -> bool:
    return found.modified_s + grace_s > now_s
