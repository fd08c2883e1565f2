"""Needed objects stay, unneeded ones go after their grace period, in an order that leaves no dangling reference."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kelvin.contracts.artifact_errors import ManifestCorrupt, ManifestMissing
from kelvin.contracts.artifacts.push_api import Condemned
from kelvin.contracts.errors import Refused
from snapshotter.maintenance.reachability_policy import (
    AuxiliaryObject,
    Collection,
    ListedManifest,
    ListedObject,
    ListedPack,
    StoreFacts,
    plan_collection,
)

NOW_S, GRACE_S = 10_000.0, 1_000.0
OLD, YOUNG = ListedObject(10, NOW_S - 5_000), ListedObject(10, NOW_S - 10)
A, B = "a" * 64, "b" * 64


def manifest(*chunks: str, at: ListedObject = OLD) -> ListedManifest:
    return ListedManifest(at, frozenset(chunks))


def pack(*chunks: str, at: ListedObject = OLD) -> ListedPack:
    return ListedPack(at, dict.fromkeys(chunks, 4096))


# Version A needs chunk 1 of pack p. Version B needs chunks 1 and 2 of packs p and q.
FACTS = StoreFacts(
    tenant="t",
    named=frozenset({A, B}),
    committing=frozenset(),
    declared_digests=frozenset(),
    pending_versions=frozenset(),
    manifests={A: manifest("1"), B: manifest("1", "2")},
    drafts={},
    condemned={},
    attestations=(AuxiliaryObject(f"t/attestations/{A}/s", OLD, A), AuxiliaryObject(f"t/attestations/{B}/s", OLD, B)),
    inputs=(AuxiliaryObject("t/inputs/a", OLD, A), AuxiliaryObject("t/inputs/b", OLD, B)),
    packs={"p": pack("1"), "q": pack("2")},
    indexes={"p": OLD, "q": OLD},
)
UNNAMED = replace(FACTS, named=frozenset({A}))
DEAD = replace(UNNAMED, condemned={B: OLD})


def keys(facts: StoreFacts) -> list[str]:
    return [freed.key for freed in plan_collection(facts, NOW_S, GRACE_S).free]


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param(FACTS, [], id="all of it is needed"),
        pytest.param(UNNAMED, [], id="a version that no model names stays for the grace period"),
        pytest.param(replace(UNNAMED, condemned={B: YOUNG}), [], id="the grace period counts from its mark"),
        pytest.param(
            DEAD,
            ["t/inputs/b", f"t/manifests/{B}", f"t/attestations/{B}/s", f"t/condemned/{B}", "t/index/q", "t/packs/q"],
            id="after it the version is freed, references first, but for shared packs",
        ),
        pytest.param(
            replace(DEAD, attestations=(AuxiliaryObject(f"t/attestations/{B}/s", YOUNG, B),),
                    inputs=(AuxiliaryObject("t/inputs/b", YOUNG, B),),
                    pack_lists=(AuxiliaryObject(f"t/packlists/{B}", YOUNG, B),),
                    declared_digests=frozenset({"2"})),
            ["t/inputs/b", f"t/manifests/{B}", f"t/attestations/{B}/s", f"t/packlists/{B}", f"t/condemned/{B}"],
            id="with everything that refers to it, however young",
        ),
        pytest.param(
            replace(DEAD, pending_versions=frozenset({B}), declared_digests=frozenset({"2"})),
            ["t/inputs/b", f"t/manifests/{B}", f"t/condemned/{B}"],
            id="statements stay while it is pushed again",
        ),
        pytest.param(replace(DEAD, named=frozenset({A, B})), [], id="a condemned version that is named again stays"),
        pytest.param(replace(DEAD, committing=frozenset({B}), declared_digests=frozenset({"1", "2"})), [],
                     id="a condemned version that is being committed stays"),
        pytest.param(replace(DEAD, declared_digests=frozenset({"2"}), inputs=(), attestations=()),
                     [f"t/manifests/{B}", f"t/condemned/{B}"], id="a chunk that an open push needs stays"),
        pytest.param(replace(FACTS, packs={**FACTS.packs, "r": pack("3")}), ["t/packs/r"],
                     id="a pack of no version, without an index"),
        pytest.param(replace(FACTS, packs={**FACTS.packs, "r": pack("3", at=YOUNG)}), [], id="a young one"),
        pytest.param(replace(FACTS, packs={**FACTS.packs, "r": pack("3", "1")}), [],
                     id="a pack with one needed chunk"),
        pytest.param(replace(FACTS, packs={**FACTS.packs, "r": ListedPack(OLD, None)}), [],
                     id="a pack with unknown chunks"),
        pytest.param(replace(FACTS, packs={"p": pack("1"), "r": pack()}, indexes={"p": OLD, "s": OLD}), [],
                     id="no pack and no index is freed while a needed chunk is in no known pack"),
        pytest.param(replace(DEAD, packs={"p": pack("1"), "r": pack()}),
                     ["t/inputs/b", f"t/manifests/{B}", f"t/attestations/{B}/s", f"t/condemned/{B}", "t/packs/r",
                      "t/index/q"],
                     id="packs are freed again once that version is gone"),
        pytest.param(replace(FACTS, indexes={**FACTS.indexes, "r": OLD}), ["t/index/r"], id="an index without a pack"),
        pytest.param(replace(FACTS, drafts={"c": manifest("3")}), ["t/drafts/c"], id="an old draft"),
        pytest.param(replace(FACTS, drafts={"c": manifest("3")},
                             attestations=(AuxiliaryObject("t/attestations/c/s", YOUNG, "c"),)),
                     ["t/attestations/c/s", "t/drafts/c"], id="an old draft with its attestation"),
        pytest.param(replace(FACTS, drafts={"c": manifest("3", at=YOUNG)}, packs={**FACTS.packs, "r": pack("3")}), [],
                     id="a young draft and its packs stay"),
        pytest.param(replace(FACTS, drafts={"c": ListedManifest(OLD, None)}), ["t/drafts/c"], id="a damaged draft"),
        pytest.param(replace(FACTS, condemned={"c": YOUNG}), ["t/condemned/c"], id="a mark without a version"),
        pytest.param(replace(FACTS, inputs=(AuxiliaryObject("t/inputs/c", YOUNG, "c"),)), [], id="young inputs"),
        pytest.param(replace(FACTS, attestations=(AuxiliaryObject("t/attestations/c/s", OLD, "c"),)),
                     ["t/attestations/c/s"], id="an attestation without a version"),
        pytest.param(replace(FACTS, attestations=(AuxiliaryObject("t/attestations/c/s", YOUNG, "c"),)), [],
                     id="a young attestation: its version may be on its way"),
    ],
)  # fmt: skip
def test_objects_to_free_and_their_order(facts: StoreFacts, want: list[str]) -> None:
    assert keys(facts) == want


def test_unnamed_versions_are_marked() -> None:
    """The first collection marks an unnamed version, and later ones count its time. A named version loses its mark."""
    chosen = plan_collection(UNNAMED, NOW_S, GRACE_S)
    assert (chosen.condemn, chosen.unmark) == ((B,), ())
    assert chosen.condemned == (Condemned(version=B, kept_s=1000),)
    chosen = plan_collection(replace(UNNAMED, condemned={B: YOUNG}), NOW_S, GRACE_S)
    assert (chosen.condemn, chosen.unmark) == ((), ())
    assert chosen.condemned == (Condemned(version=B, kept_s=990),)
    assert plan_collection(replace(FACTS, condemned={B: OLD}), NOW_S, GRACE_S).unmark == (B,)
    at_once = plan_collection(UNNAMED, NOW_S, 0)
    assert (at_once.condemn, at_once.condemned) == ((), ())
    assert f"t/manifests/{B}" in [freed.key for freed in at_once.free]


def test_kept_objects_are_counted() -> None:
    """The plan counts kept versions and packs, and bytes of unneeded chunks in them."""
    chosen = plan_collection(replace(FACTS, packs={**FACTS.packs, "r": pack("3", "1")}), NOW_S, GRACE_S)
    assert (chosen.versions, chosen.packs, chosen.unreferenced_bytes) == (2, 3, 4096)
    assert _after(DEAD).packs == 1


def _after(facts: StoreFacts) -> Collection:
    return plan_collection(facts, NOW_S, GRACE_S)


@pytest.mark.parametrize(
    ("manifests", "failure"),
    [
        pytest.param({A: manifest("1")}, ManifestMissing, id="a named version's manifest is gone"),
        pytest.param({A: manifest("1"), B: ListedManifest(OLD, None)}, ManifestCorrupt, id="or is damaged"),
    ],
)
def test_unknown_need_stops_the_collection(manifests: Mapping[str, ListedManifest], failure: type) -> None:
    """Nothing is freed while the needs of a named version are unknown."""
    with pytest.raises(Refused) as refused:
        plan_collection(replace(FACTS, manifests=manifests), NOW_S, GRACE_S)
    assert isinstance(refused.value.failure, failure)
    assert B in refused.value.failure.message
