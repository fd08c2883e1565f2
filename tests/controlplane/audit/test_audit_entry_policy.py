"""The audit hash chain: how each change to it is reported, and how long the entry of an action is kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from controlplane.audit.audit_entry_policy import (
    DEFAULT_DAYS,
    AuditAction,
    AuditEntry,
    AuditWindow,
    EntryBody,
    chained_values,
    changed_fields,
    created_fields,
    min_days,
    verify,
    window_of,
)
from controlplane.db.hash_chain_policy import AUDIT, LEDGER, RowKind, digest_of, genesis

Entries = list[AuditEntry]


def chained(tenant: str = "acme", count: int = 5) -> Entries:
    """Return a valid chain of key creations, one per second."""
    chain, found = genesis(AUDIT, tenant), []
    for link in range(1, count + 1):
        body = EntryBody("acme", f"key{link}", "key.created", f"k{link}", "", "{}", "", f"salt{link}")
        chain = digest_of(chain, chained_values(link, link, "keys", body.digest()))
        found.append(AuditEntry(link, link, "keys", body.digest(), chain.hex(), body))
    return found


def end_of(entries: Entries) -> tuple[int, str]:
    return entries[-1].link, entries[-1].chain


def _flipped(entries: Entries) -> Entries:
    body = entries[2].body
    assert body is not None
    return [*entries[:2], replace(entries[2], body=replace(body, actor="key9")), *entries[3:]]


def _swapped(entries: Entries) -> Entries:
    second, third = replace(entries[2], link=2), replace(entries[1], link=3)
    return [entries[0], second, third, *entries[3:]]


def _emptied(entries: Entries, *links: int) -> Entries:
    return [replace(each, body=None) if each.link in links else each for each in entries]


@pytest.mark.parametrize(
    ("change", "link", "says"),
    [
        pytest.param(lambda e: e, None, "", id="unchanged"),
        pytest.param(_flipped, 3, "its body is not what was written", id="a changed field"),
        pytest.param(lambda e: [*e[:2], *e[3:]], 3, "a row is missing", id="an entry removed from the middle"),
        pytest.param(_swapped, 2, "the row, or one before it, is not", id="two entries swapped"),
        pytest.param(lambda e: e[:4], 5, "5 links were written", id="the last entry removed"),
        pytest.param(lambda e: [], 1, "the chain ends with link 0", id="all entries removed"),
        pytest.param(lambda e: e[1:], 1, "comes after link 0", id="the first entry removed"),
        pytest.param(lambda e: [*e, e[-1]], 6, "one too many", id="an entry twice"),
        pytest.param(lambda e: [replace(e[0], at_s=9), *e[1:]], 1, "is not what was written", id="a changed time"),
        pytest.param(lambda e: [replace(e[0], window="models"), *e[1:]], 1, "is not", id="a changed window"),
        pytest.param(lambda e: _emptied(e, 1, 2), None, "", id="emptied entries from before the recorded expiry"),
        pytest.param(lambda e: _emptied(e, 3), 3, "no entry says that it expired", id="emptied before its time"),
        pytest.param(
            lambda e: [replace(_emptied(e, 1)[0], digest="0" * 64), *e[1:]],
            1,
            "is not what",
            id="an emptied entry with a changed digest",
        ),
        pytest.param(
            lambda e: [replace(_emptied(e, 1)[0], at_s=0), *e[1:]],
            1,
            "is not what",
            id="an emptied entry with a changed time",
        ),
    ],
)
def test_verify(change: Callable[[Entries], Entries], link: int | None, says: str) -> None:
    """Verification names the first changed link. All links before it hold."""
    entries = chained()
    found = verify("acme", change(entries), end_of(entries), {"keys": 3})
    assert (found.difference is None) is (link is None)
    assert says in (found.difference or "")
    assert found.links == (5 if link is None else link - 1)


def test_a_chain_is_one_tenants() -> None:
    """Another tenant's chain has another start, so it does not verify these entries. An empty chain is valid."""
    entries = chained("acme")
    assert verify("other", entries, end_of(entries), {}).difference is not None
    assert verify("acme", [], None, {}).difference is None
    assert verify("acme", [], (0, genesis(AUDIT, "acme").hex()), {}).difference is None


def test_emptied_entries_that_hold_are_counted() -> None:
    """The wrong entry is not counted."""
    entries = chained()
    assert verify("acme", _emptied(entries, 1, 2), end_of(entries), {"keys": 3}).expired == 2
    assert verify("acme", _emptied(entries, 1, 2, 3), end_of(entries), {"keys": 3}).expired == 2


def test_digests_stay_what_they_were() -> None:
    """Databases hold these digests. A change of the encoding needs a new format name."""
    start, body = genesis(AUDIT, "acme"), EntryBody("acme", "key1", "key.created", "k1", "", "{}", "req_7", "salt")
    assert start.hex() == "b0aaf18e56f51c89d094e60fd54cbf7329166a3fd3ba5aa2b2ceae0fd5161665"
    assert body.digest() == "23fd39f2f4f87dd63d06d0a19530a6a4407e22a6264888c84b1d0ee7f179e6f3"
    end = digest_of(start, chained_values(1, 1, AuditWindow.KEYS, body.digest()))
    assert end.hex() == "421b1c96f9ac47949c8d76c3d3c06836a438dc09ff61a633a7fba0105d94c838"
    start = genesis(LEDGER, "acme", "2026-11")
    assert start.hex() == "b023096d5c1420f318ccf1cae177f30578419a07628acad6eb99ea1c33d8731b"
    end = digest_of(start, (RowKind.CONFLICT, "a", None, 1, True))
    assert end.hex() == "5ca45dddd5c218c20ef637b07d58b4c280fe8a7a192641f56d4f76d5b5064e0f"


def test_a_digest_covers_each_word() -> None:
    """Changing any field changes the digest. The salt keeps short values from being guessed."""
    body = chained()[0].body
    assert body is not None
    others = {replace(body, **{name: "other"}).digest() for name in EntryBody.__dataclass_fields__}
    assert len(others | {body.digest()}) == len(EntryBody.__dataclass_fields__) + 1


@pytest.mark.parametrize("action", AuditAction)
def test_every_action_has_a_window(action: AuditAction) -> None:
    """Each window has a default, except the trail's own. Only access entries may be kept for zero days."""
    window = window_of(action)
    assert window is AuditWindow.TRAIL or DEFAULT_DAYS[window] > 0
    assert min_days(window) == (0 if window is AuditWindow.ACCESS else 1)


def test_changed_and_created_fields() -> None:
    """Changed fields show both values, created fields only the new one."""
    assert changed_fields({"a": 1, "b": 2}, {"b": 3, "c": None}) == {"a": (1, None), "b": (2, 3)}
    assert created_fields(a=None, b="x", c=(), d=0) == {"b": (None, "x"), "d": (None, 0)}
