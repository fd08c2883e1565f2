"""The table follows the feed: full lines replace, others change, removals remove."""

from activator.authenticate import authenticate
from activator.table import Table
from contracts.control import Feed, ModelRow, Scope
from contracts.errors import Failure, Forbidden, Refused, Unauthenticated
from tests.activator.control import ADMIN, KEY, OTHER, VERSION, key_row, snapshot, version_row


def _table() -> Table:
    table = Table()
    table.apply(snapshot())
    return table


def test_a_snapshot_replaces_everything() -> None:
    """What it doesn't name is gone."""
    table = _table()
    assert table.principal(KEY) is not None
    table.apply(Feed(revision=9, full=True))
    assert (table.principal(KEY), table.model("default", "m"), table.revision) == (None, None, 9)
    table.check_integrity()


def test_changes_add_up() -> None:
    """A new version and a moved alias leave the rest alone; order of arrival doesn't matter."""
    table = _table()
    new = "00" * 32
    table.apply(Feed(revision=2, versions=(version_row("default", "m", new),)))
    table.apply(
        Feed(revision=3, models=(ModelRow(tenant="default", model="m", aliases={"prod": new}, created_at_s=7),))
    )
    entry = table.model("default", "m")
    assert entry is not None
    assert [row.version for row in entry.versions] == [new, VERSION, OTHER]
    assert entry.aliases == {"prod": new}
    table.apply(Feed(revision=4, versions=(version_row("default", "early", new),)))
    table.check_integrity()
    assert [entry.model for entry in table.models("default")] == ["early", "m"]
    table.apply(Feed(revision=5, removed_versions=(("default", "m", new), ("default", "no", new), ("who", "m", new))))
    entry = table.model("default", "m")
    assert entry is not None
    assert [row.version for row in entry.versions] == [VERSION, OTHER]
    table.check_integrity()
    table.apply(Feed(revision=6, removed_models=(("default", "m"),)))
    assert table.model("default", "m") is None
    assert table.model("stranger", "theirs") is not None
    table.check_integrity()


def test_a_key_is_revoked_and_rotated() -> None:
    """By its id; a row of the same id replaces the old secret."""
    table = _table()
    table.apply(Feed(revision=2, keys=(key_row("k1", "kv-new", "default", Scope.INFER),)))
    assert table.principal(KEY) is None
    assert table.principal("kv-new") is not None
    table.apply(Feed(revision=3, removed_keys=("k1", "unknown")))
    assert table.principal("kv-new") is None
    table.check_integrity()


def _refusal(authorization: bytes | None, scope: Scope) -> Failure | None:
    try:
        authenticate(_table(), authorization, scope)
    except Refused as refused:
        return refused.failure
    return None


def test_authenticate() -> None:
    """Bearer and a known key with the scope; everything else is told no more than that."""
    bearer = b"Bearer " + KEY.encode()
    assert _refusal(bearer, Scope.INFER) is None
    assert _refusal(b"bearer  " + KEY.encode(), Scope.INFER) is None
    assert _refusal(b"Bearer " + ADMIN.encode(), Scope.ADMIN) is None
    assert _refusal(bearer, Scope.ADMIN) == Forbidden("admin")
    for wrong in (None, b"", KEY.encode(), b"Basic " + KEY.encode(), b"Bearer", b"Bearer x", b"Bearer \xff" * 999):
        assert _refusal(wrong, Scope.INFER) == Unauthenticated()
