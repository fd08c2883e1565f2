"""RoutingTable: full feed lines replace its contents, others change it, removals remove rows."""

import tracemalloc

import msgspec
import pytest

from activator.routing.policy.version_key import VersionKey
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed, ModelRow, RevisionRow, Scope, TenantLimits, TenantRow
from kelvin.contracts.wire import decode, encode
from tests.activator.control import KEY, OTHER, VERSION, key_row, replica_row, snapshot, version_row


def _table() -> RoutingTable:
    table = RoutingTable()
    table.apply(snapshot())
    return table


def test_a_snapshot_replaces_everything() -> None:
    table = _table()
    assert table.principal(KEY, 0) is not None
    table.apply(Feed(revision=9, full=True))
    assert (table.principal(KEY, 0), table.model("default", "m"), table.revision) == (None, None, 9)
    table.check_integrity()


def test_table_is_unavailable_before_the_first_feed_line() -> None:
    """A new activator does not call a valid key wrong. The refusal is retryable."""
    table = RoutingTable()
    with pytest.raises(Refused) as caught:
        table.principal(KEY, 0)
    assert caught.value.failure.retryable
    table.apply(snapshot())
    assert table.principal(KEY, 0) is not None


def test_feed_changes_are_applied_in_any_order() -> None:
    """A new version and a moved alias leave other rows unchanged."""
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


def test_where_a_version_is_scaled_is_known_until_it_is_not() -> None:
    """A revision is added, renamed, and removed by its own row, with its version, or by a snapshot without it."""
    table, key = _table(), VersionKey("default", "m", VERSION)

    def apply_revision(name: str) -> RevisionRow:
        row = RevisionRow(tenant="default", model="m", version=VERSION, namespace="models", name=name)
        table.apply(Feed(revision=2, revisions=(row,)))
        assert table.revisions.find_revision(key) == row
        assert table.revisions.find_version("models", name) == key
        assert table.snapshot().revisions == (row,)
        table.check_integrity()
        return row

    assert table.revisions.find_revision(key) is None
    apply_revision("m-00001")
    apply_revision("m-00002")
    assert table.revisions.find_version("models", "m-00001") is None, "it has another name now"
    for gone in (
        Feed(revision=3, removed_revisions=(key,)),
        Feed(revision=3, removed_versions=(key,)),
        Feed(revision=3, full=True),
    ):
        apply_revision("m-00001")
        table.apply(gone)
        assert table.revisions.find_revision(key) is None
        assert table.revisions.find_version("models", "m-00001") is None
        assert table.snapshot().revisions == ()
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
def test_grant_ends_by_revocation_removal_or_suspension(end: Feed) -> None:
    """Until then the grantee's list has the model after its own, and no other tenant's list has it."""
    table = _table()
    assert table.find_callable_model("stranger", "default", "m") is None
    table.apply(_granting("stranger"))
    # a new version does not change the grant
    table.apply(Feed(revision=2, versions=(version_row("default", "m", "00" * 32),)))
    table.check_integrity()
    assert [entry.name_for("stranger") for entry in table.models("stranger")] == ["theirs", "default/m"]
    assert table.find_callable_model("stranger", "default", "m") is table.find_callable_model("default", "default", "m")
    assert table.find_callable_model("third", "default", "m") is None
    assert table.find_callable_model("default", "stranger", "theirs") is None
    assert table.find_callable_model("stranger", "default", "other") is None
    kept = RoutingTable()
    kept.apply(msgspec.structs.replace(table.snapshot(), full=True))
    assert kept.snapshot() == table.snapshot()
    table.apply(end)
    table.check_integrity()
    assert table.find_callable_model("stranger", "default", "m") is None
    assert "default/m" not in [entry.name_for("stranger") for entry in table.models("stranger")]


def test_a_model_that_comes_again_is_granted_to_nobody() -> None:
    """A new model of the same name does not inherit grants."""
    table = _table()
    table.apply(_granting("stranger"))
    table.apply(Feed(revision=3, removed_models=(("default", "m"),)))
    table.apply(_granting())
    table.check_integrity()
    assert table.find_callable_model("stranger", "default", "m") is None


def test_a_key_is_revoked_and_rotated() -> None:
    """A key is removed by its id. A row with the same id replaces the secret."""
    table = _table()
    table.apply(Feed(revision=2, keys=(key_row("k1", "kv-new", "default", Scope.INFER),)))
    assert table.principal(KEY, 0) is None
    assert table.principal("kv-new", 0) is not None
    table.apply(Feed(revision=3, removed_keys=("k1", "unknown")))
    assert table.principal("kv-new", 0) is None
    table.check_integrity()


def test_a_key_expires_by_itself() -> None:
    """The key is invalid from its expiry second on, even without a control plane."""
    table = _table()
    row = msgspec.structs.replace(key_row("k1", KEY, "default", Scope.INFER), expires_at_s=100)
    table.apply(Feed(revision=2, keys=(row,)))
    assert table.principal(KEY, 99.9) is not None
    assert table.principal(KEY, 100.0) is None


def test_tenants_are_suspended_resumed_and_removed() -> None:
    """A suspended tenant's keys stay known. A removed tenant is unknown."""
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
    """The last row counts. A tenant without limits and an unknown one have none."""
    table = _table()
    assert table.limits("default") == table.limits("nobody") == TenantLimits()
    limits = TenantLimits(requests=3)
    table.apply(Feed(revision=2, tenants=(TenantRow(tenant="default", suspended=False, limits=limits),)))
    assert table.limits("default") == limits
    table.apply(Feed(revision=3, tenants=(TenantRow(tenant="default", suspended=False),)))
    assert table.limits("default") == TenantLimits()


def test_rows_are_gathered_again_only_where_they_changed() -> None:
    """Frequent lines (replicas, keys) don't rebuild the rows of models. Lines that change models do."""
    table = _table()
    before = table.snapshot()
    for quiet in (
        Feed(revision=2, replicas=(replica_row("r"),), removed_replicas=("q",)),
        Feed(revision=3, keys=(key_row("late", "kv-late", "default", Scope.INFER),), removed_keys=("k3",)),
        Feed(revision=4, tenants=(TenantRow(tenant="default", suspended=True),)),
    ):
        table.apply(quiet)
        assert table.snapshot().models is before.models
        assert table.snapshot().versions is before.versions
    assert (table.snapshot().keys, table.snapshot().tenants) != (before.keys, before.tenants)
    for feed_message in (
        _granting("stranger"),
        Feed(revision=5, versions=(version_row("default", "m", "00" * 32),)),
        Feed(revision=6, removed_versions=(("default", "m", "00" * 32),)),
        Feed(revision=7, removed_models=(("default", "m"),)),
        Feed(revision=8, full=True),
    ):
        rows = table.snapshot()
        table.apply(feed_message)
        table.check_integrity()
        assert (table.snapshot().models, table.snapshot().versions) != (rows.models, rows.versions)


def test_lists_are_made_again_only_where_they_may_have_changed() -> None:
    """Repeated lists of ten thousand models don't rebuild the list each time."""
    table = _table()
    table.apply(_granting("stranger"))
    for quiet in (
        Feed(revision=2, replicas=(replica_row("r"),), removed_replicas=("q",)),
        Feed(revision=3, keys=(key_row("late", "kv-late", "default", Scope.INFER),), removed_keys=("k3",)),
    ):
        before = table.models("stranger")
        table.apply(quiet)
        assert table.models("stranger") is before

    def names() -> list[str]:
        table.check_integrity()
        return [entry.name_for("stranger") for entry in table.models("stranger")]

    both = ["theirs", "default/m"]
    for line, want in (
        (Feed(revision=4, versions=(version_row("stranger", "early", "00" * 32),)), ["early", *both]),
        (Feed(revision=5, removed_models=(("stranger", "early"),)), both),
        (Feed(revision=6, tenants=(TenantRow(tenant="default", suspended=True),)), ["theirs"]),
        (Feed(revision=7, tenants=(TenantRow(tenant="default", suspended=False),)), both),
        (Feed(revision=8, removed_tenants=("default",)), both),
        (_granting(), ["theirs"]),
        (Feed(revision=9, full=True), []),
    ):
        before = table.models("stranger")
        table.apply(line)
        assert names() == want
        assert table.models("stranger") is not before


def test_what_an_idle_model_takes() -> None:
    """An idle model uses less than 4 KB, including the gathered rows."""
    count = 2000
    names = [f"model-{number}" for number in range(count)]
    raw = encode(
        Feed(
            revision=1,
            full=True,
            models=tuple(
                ModelRow(tenant="default", model=name, aliases={"prod": f"{number:064x}"}, created_at_s=7)
                for number, name in enumerate(names)
            ),
            versions=tuple(version_row("default", name, f"{number:064x}") for number, name in enumerate(names)),
        )
    )
    tracemalloc.start()
    try:
        table = RoutingTable()
        table.apply(decode(raw, Feed))
        table.snapshot()
        taken = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert 500 < taken < 4096
