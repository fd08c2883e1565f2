"""The table follows the feed: full lines replace, others change, removals remove."""

import msgspec
import pytest

from activator.table import Table
from contracts.control import Feed, ModelRow, Scope, TenantLimits, TenantRow
from contracts.errors import Refused
from tests.activator.control import KEY, OTHER, VERSION, key_row, snapshot, version_row


def _table() -> Table:
    table = Table()
    table.apply(snapshot())
    return table


def test_a_snapshot_replaces_everything() -> None:
    """What it doesn't name is gone."""
    table = _table()
    assert table.principal(KEY, 0) is not None
    table.apply(Feed(revision=9, full=True))
    assert (table.principal(KEY, 0), table.model("default", "m"), table.revision) == (None, None, 9)
    table.check_integrity()


def test_nobody_is_known_before_the_first_line() -> None:
    """A right key is not called wrong by a door that has just opened: its caller is told to come back."""
    table = Table()
    with pytest.raises(Refused) as caught:
        table.principal(KEY, 0)
    assert caught.value.failure.retryable
    table.apply(snapshot())
    assert table.principal(KEY, 0) is not None


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


def _granting(*grantees: str) -> Feed:
    row = ModelRow(tenant="default", model="m", aliases={"prod": VERSION}, created_at_s=7, grantees=grantees)
    return Feed(revision=2, models=(row,))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(_granting(), id="it is revoked"),
        pytest.param(_granting("others"), id="others have one"),
        pytest.param(
            Feed(revision=3, tenants=(TenantRow(tenant="default", suspended=True),)), id="its owner suspended"
        ),
        pytest.param(Feed(revision=3, removed_models=(("default", "m"),)), id="the model is deleted"),
        pytest.param(Feed(revision=3, full=True, tenants=snapshot().tenants), id="a snapshot that knows none"),
    ],
)
def test_a_grant_lasts_until(end: Feed) -> None:
    """Until then the grantee has the model in its list, after its own, and nobody else does."""
    table = _table()
    assert table.callable("stranger", "default", "m") is None
    table.apply(_granting("stranger"))
    table.apply(Feed(revision=2, versions=(version_row("default", "m", "00" * 32),)))  # a version changes nothing of it
    table.check_integrity()
    assert [entry.name_for("stranger") for entry in table.models("stranger")] == ["theirs", "default/m"]
    assert table.callable("stranger", "default", "m") is table.callable("default", "default", "m")
    assert table.callable("third", "default", "m") is None
    assert table.callable("default", "stranger", "theirs") is None
    assert table.callable("stranger", "default", "other") is None
    kept = Table()
    kept.apply(msgspec.structs.replace(table.rows(), full=True))
    assert kept.rows() == table.rows()
    table.apply(end)
    table.check_integrity()
    assert table.callable("stranger", "default", "m") is None
    assert "default/m" not in [entry.name_for("stranger") for entry in table.models("stranger")]


def test_a_model_that_comes_again_is_granted_to_nobody() -> None:
    """A name is not the model that had it."""
    table = _table()
    table.apply(_granting("stranger"))
    table.apply(Feed(revision=3, removed_models=(("default", "m"),)))
    table.apply(_granting())
    table.check_integrity()
    assert table.callable("stranger", "default", "m") is None


def test_a_key_is_revoked_and_rotated() -> None:
    """By its id; a row of the same id replaces the old secret."""
    table = _table()
    table.apply(Feed(revision=2, keys=(key_row("k1", "kv-new", "default", Scope.INFER),)))
    assert table.principal(KEY, 0) is None
    assert table.principal("kv-new", 0) is not None
    table.apply(Feed(revision=3, removed_keys=("k1", "unknown")))
    assert table.principal("kv-new", 0) is None
    table.check_integrity()


def test_a_key_expires_by_itself() -> None:
    """Whether or not the control plane is there to say so; in its second of expiry it is no longer good."""
    table = _table()
    row = msgspec.structs.replace(key_row("k1", KEY, "default", Scope.INFER), expires_at_s=100)
    table.apply(Feed(revision=2, keys=(row,)))
    assert table.principal(KEY, 99.9) is not None
    assert table.principal(KEY, 100.0) is None


def test_tenants_are_suspended_resumed_and_removed() -> None:
    """Their keys stay known; nothing is known of one that was removed."""
    table = _table()
    assert table.tenants() == {"default", "stranger"}
    table.apply(Feed(revision=2, tenants=(TenantRow(tenant="default", suspended=True),)))
    assert table.is_suspended("default")
    assert table.principal(KEY, 0) is not None
    resumed = TenantRow(tenant="default", suspended=False)
    table.apply(Feed(revision=3, tenants=(resumed,), removed_tenants=("stranger",)))
    assert not table.is_suspended("default")
    assert table.tenants() == {"default"}


def test_limits_of_tenants() -> None:
    """As the last row says; none for a tenant that has none, and for an unknown one."""
    table = _table()
    assert table.limits("default") == table.limits("nobody") == TenantLimits()
    limits = TenantLimits(requests=3)
    table.apply(Feed(revision=2, tenants=(TenantRow(tenant="default", suspended=False, limits=limits),)))
    assert table.limits("default") == limits
    table.apply(Feed(revision=3, tenants=(TenantRow(tenant="default", suspended=False),)))
    assert table.limits("default") == TenantLimits()
