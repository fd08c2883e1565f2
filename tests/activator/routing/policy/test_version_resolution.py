"""Which version a model reference means: aliases, prefixes, traffic splits, and a previous version during a rollout."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.routing.policy.version_resolution import (
    Availability,
    ModelEntry,
    assign_version,
    choose_version,
    find_version,
    merge_references,
    resolve_version,
)
from kelvin.contracts.errors import InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.names import parse_reference
from tests.activator.control import version_row

A, AB, B = "a" * 64, "a" * 30 + "b" * 34, "b" * 64
ENTRY = ModelEntry(
    "t", "m", {"prod": A, "next": B, "ghost": "c" * 64}, 0, tuple(version_row("t", "m", v) for v in (A, AB, B))
)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        pytest.param("m", A, id="a bare name is prod"),
        pytest.param("m@prod", A, id="prod by name"),
        pytest.param("m@next", B, id="another alias"),
        pytest.param("m@" + "b" * 12, B, id="twelve digits that fit one version"),
        pytest.param("m@" + AB, AB, id="the whole version"),
        pytest.param("m@" + "a" * 31, A, id="digits up to where two versions differ"),
        pytest.param("m@" + "a" * 12, InvalidRequest, id="digits that fit two versions are ambiguous"),
        pytest.param("m@" + "c" * 12, ModelNotFound, id="digits that fit none"),
        pytest.param("m@nothing", ModelNotFound, id="no such alias"),
        pytest.param("m@ghost", ModelNotFound, id="an alias of a version that may not be addressed"),
    ],
)
def test_reference_resolves_to_a_version(name: str, want: str | type) -> None:
    if isinstance(want, str):
        assert resolve_version(parse_reference(name), ENTRY).version == want
        return
    with pytest.raises(Refused) as refused:
        resolve_version(parse_reference(name), ENTRY)
    assert isinstance(refused.value.failure, want)


@pytest.mark.parametrize(
    ("name", "split", "split_key", "want"),
    [
        pytest.param("m", {AB: 1, B: 1}, "key 0", None, id="a bare name is shared"),
        pytest.param("m@prod", {AB: 1, B: 1}, "key 0", None, id="prod is shared"),
        pytest.param("m@next", {AB: 1, A: 1}, "key 0", B, id="another alias is its version"),
        pytest.param("m@" + AB, {A: 1, B: 1}, "key 0", AB, id="a version is itself"),
        pytest.param("m", {"c" * 64: 1}, "key 0", A, id="a version that may not be addressed leaves it to prod"),
        pytest.param("m", {AB: 1, B: 1}, None, A, id="no split key: prod"),
        pytest.param("m", {}, "key 0", A, id="no split"),
    ],
)
def test_split_reference_resolves_by_split_key(
    name: str, split: dict[str, int], split_key: str | None, want: str | None
) -> None:
    """None: the split decides, and over many keys both versions are chosen."""
    entry = replace(ENTRY, split=split)
    if want is not None:
        assert resolve_version(parse_reference(name), entry, split_key).version == want
        return
    assert {resolve_version(parse_reference(name), entry, f"key {n}").version for n in range(40)} == set(split)


@pytest.mark.parametrize(
    ("meanwhile", "new", "old", "want"),
    [
        pytest.param({B: A}, Availability.ASLEEP, Availability.ROOM, A, id="it has no replica"),
        pytest.param({B: A}, Availability.ASLEEP, Availability.FULL, A, id="a queue is shorter than a start"),
        pytest.param({B: A}, Availability.FULL, Availability.ROOM, A, id="it has no slot"),
        pytest.param({B: A}, Availability.ROOM, Availability.ROOM, B, id="it has a slot"),
        pytest.param({B: A}, Availability.FULL, Availability.FULL, B, id="both are full"),
        pytest.param({B: A}, Availability.ASLEEP, Availability.ASLEEP, B, id="both have no replica"),
        pytest.param(
            {B: "c" * 64}, Availability.ASLEEP, Availability.ROOM, B, id="the one before may not be addressed"
        ),
        pytest.param({A: AB}, Availability.ASLEEP, Availability.ROOM, B, id="another version has a previous one"),
        pytest.param({}, Availability.ASLEEP, Availability.ROOM, B, id="no version has a previous one"),
    ],
)
def test_more_available_version_answers_meanwhile(
    meanwhile: dict[str, str], new: Availability, old: Availability, want: str
) -> None:
    """The reference means `B`, and `A` was the version before it."""
    entry = replace(ENTRY, meanwhile=meanwhile)
    (row,) = (each for each in entry.versions if each.version == B)
    assert choose_version(row, entry, lambda each: new if each is row else old).version == want


def test_only_its_own_kind_answers_for_a_version() -> None:
    """An embedding model does not answer completions."""
    versions = (msgspec.structs.replace(ENTRY.versions[0], kind="embed"), *ENTRY.versions[1:])
    entry = replace(ENTRY, meanwhile={B: A}, versions=versions)
    assert choose_version(versions[2], entry, lambda row: Availability(2 * (row.version == A))).version == B


@pytest.mark.parametrize(
    ("in_url", "in_body", "want"),
    [
        pytest.param(None, "m", "m@prod", id="the body alone"),
        pytest.param("m", None, "m@prod", id="the URL alone"),
        pytest.param("m", "m", "m@prod", id="both the same"),
        pytest.param("m", "m@next", "m@next", id="the body says more"),
        pytest.param("m@next", "m", "m@next", id="the URL says more"),
        pytest.param("m@prod", "m@next", None, id="two aliases"),
        pytest.param("m", "other", None, id="two models"),
        pytest.param(None, "t/m", "t/m@prod", id="another tenant's"),
        pytest.param("m", "t/m", "t/m@prod", id="the body adds the tenant"),
        pytest.param("m@next", "t/m", "t/m@next", id="the URL says the alias, the body the tenant"),
        pytest.param("m@next", "t/m@next", "t/m@next", id="the alias twice"),
        pytest.param("m@next", "t/m@prod", None, id="two aliases of another tenant's"),
        pytest.param("m", "t/other", None, id="two models, one of another tenant"),
        pytest.param(None, None, None, id="none at all"),
        pytest.param(None, "../m", None, id="an invalid name"),
    ],
)
def test_url_and_body_must_name_the_same_model(in_url: str | None, in_body: str | None, want: str | None) -> None:
    """A contradiction is 400."""
    if want is not None:
        assert str(merge_references(in_url, in_body)) == want
        return
    with pytest.raises(Refused) as refused:
        merge_references(in_url, in_body)
    assert isinstance(refused.value.failure, InvalidRequest)


@given(st.sets(st.text("ab", min_size=64, max_size=64), max_size=8), st.integers(12, 64), st.data())
def test_a_prefix_means_the_only_version_that_has_it(versions: set[str], length: int, data: st.DataObject) -> None:
    """Bisection finds what a full scan finds."""
    entry = ModelEntry("t", "m", {}, 0, tuple(version_row("t", "m", v) for v in sorted(versions)))
    prefix = data.draw(st.sampled_from(sorted(versions)) if versions else st.just("a" * 64))[:length]
    fitting = [v for v in versions if v.startswith(prefix)]
    reference = parse_reference(f"m@{prefix}")
    if len(fitting) == 1:
        assert [resolve_version(reference, entry).version] == fitting
    else:
        with pytest.raises(Refused) as refused:
            resolve_version(reference, entry)
        assert isinstance(refused.value.failure, InvalidRequest if fitting else ModelNotFound)
    for version in versions:
        assert find_version(entry, version) is not None


SPLIT_KEYS = [f"key {number}" for number in range(4000)]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({"a": 1, "b": 1}, id="halves"),
        pytest.param({"a": 90, "b": 10}, id="nine to one"),
        pytest.param({"a": 5, "b": 3, "c": 2}, id="three of them"),
        pytest.param({"a": 1}, id="one has all"),
    ],
)
def test_split_shares_match_weights(weights: dict[str, int]) -> None:
    """The shares are within a fifth over thousands of keys, and don't depend on the order of versions."""
    found = Counter(assign_version(weights, split_key) for split_key in SPLIT_KEYS)
    total = sum(weights.values())
    for version, weight in weights.items():
        assert found[version] == pytest.approx(len(SPLIT_KEYS) * weight / total, rel=0.2)
    assert [assign_version(dict(reversed(weights.items())), split_key) for split_key in SPLIT_KEYS[:200]] == [
        assign_version(weights, split_key) for split_key in SPLIT_KEYS[:200]
    ]


def test_growing_weight_moves_no_key_back() -> None:
    """As the weight grows from nothing to all, a key at the new version stays there."""
    at_new: set[str] = set()
    for percent in (1, 5, 25, 50, 99):
        now = {
            split_key
            for split_key in SPLIT_KEYS
            if assign_version({"old": 100 - percent, "new": percent}, split_key) == "new"
        }
        assert at_new <= now
        at_new = now


def test_third_version_moves_no_key_between_the_others() -> None:
    """Only the third version gains keys. Hashing by remainder would move keys between the others."""
    two, three = {"a": 5, "b": 5}, {"a": 5, "b": 5, "c": 5}
    moved = [(assign_version(two, split_key), assign_version(three, split_key)) for split_key in SPLIT_KEYS]
    assert {pair for pair in moved if pair[0] != pair[1]} == {("a", "c"), ("b", "c")}
