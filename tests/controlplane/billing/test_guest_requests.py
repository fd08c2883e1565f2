"""Requests at another tenant's replica: the caller pays tokens, the owner device time, and both bills balance."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from controlplane.ledger.policy.discrepancies import DiscrepancyKind
from kelvin.contracts.accounting.billing_reports import BillingReport
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from tests.controlplane.billing_fixture import (
    UsageRecord,
    enter,
    ledger_and_registry_engine,
    report,
    run_usage_audit,
    verify,
)
from tests.controlplane.usage_records import MONTH, lifetime_record, request_record


def _guests(number: int, **more: object) -> RequestRecord:
    """Return a request of the tenant `guest` at a replica of acme."""
    return msgspec.structs.replace(request_record(number, tenant="guest", model="acme/m"), **more)


def _month() -> list[UsageRecord]:
    """Return one request of the owner and two of the guest, at one replica that served three."""
    return [request_record(1), _guests(2), _guests(3), lifetime_record(1, runtime_id="rt-1", requests=3)]


def _bill(engine: Engine, tenant: str, live: set[str] | None = None) -> BillingReport:
    return report(engine, tenant=tenant, live=live or set())


def _differences(engine: Engine, tenant: str, month: str | None = None) -> list[tuple[str, str]]:
    return [(str(each.kind), each.subject) for each in run_usage_audit(engine, month, tenant=tenant).differences]


def test_guest_pays_tokens_and_owner_pays_device_time(engine: Engine) -> None:
    """The guest's lines name the model with its owner."""
    enter(engine, _month())
    owners, guests = _bill(engine, "acme"), _bill(engine, "guest")
    assert (owners.requests, guests.requests) == ({"ok": 1}, {"ok": 2})
    assert {line.model for line in owners.lines} == {"m"}
    assert {line.model for line in guests.lines} == {"acme/m"}
    assert owners.device
    assert not guests.device
    assert owners.balance.balanced
    assert guests.balance.balanced
    for tenant in ("acme", "guest"):
        for month in (None, MONTH):
            assert _differences(engine, tenant, month) == []
        assert verify(engine, tenant).sound


@pytest.mark.parametrize(
    ("left_out", "kind"),
    [
        pytest.param(1, DiscrepancyKind.REQUESTS_MISSING, id="a guest's record is lost"),
        pytest.param(3, DiscrepancyKind.LIFETIME_MISSING, id="the replica's lifetime record is lost"),
    ],
)
def test_missing_record_is_reported_to_the_owner_only(engine: Engine, left_out: int, kind: DiscrepancyKind) -> None:
    """It is reported once. The guest does not own the replica."""
    records = _month()
    del records[left_out]
    enter(engine, [msgspec.structs.replace(each, sequence=1, source=f"s{at}") for at, each in enumerate(records)])
    assert _differences(engine, "acme") == [(kind, "rt-1")]
    assert _differences(engine, "guest") == []
    assert [each.kind for each in _bill(engine, "acme").balance.problems] == [kind]
    assert _bill(engine, "guest").balance.balanced


def test_replica_used_by_guests_only_is_open_at_its_owner(engine: Engine) -> None:
    """It is open until its lifetime is recorded. The guest's bill does not list it."""
    enter(engine, [_guests(1)])
    assert _bill(engine, "acme", {"rt-1"}).open_runtimes == ("rt-1",)
    assert _bill(engine, "guest", {"rt-1"}).open_runtimes == ()


def test_guest_requests_balance_the_owners_replica(engine: Engine) -> None:
    """Negative control: without the replica's totals, the owner's audit reports a missing request."""
    enter(engine, [_guests(1), lifetime_record(1, runtime_id="rt-1", requests=1)])
    assert _differences(engine, "acme", MONTH) == []
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM ledger_runtime_totals"))
    assert _differences(engine, "acme", MONTH) == [(DiscrepancyKind.REQUESTS_MISSING, "rt-1")]
    assert _differences(engine, "guest") == [("total_wrong", "replica rt-1")]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(5)), st.booleans())
def test_an_orphans_and_its_activators_record_are_one(order: list[int], both: bool) -> None:
    """This holds in any order, in batches of one. The orphan record of a guest's request names the guest, too."""
    orphan = _guests(
        2, origin=RecordOrigin.ORPHAN, source="rt-1", sequence=1, outcome="cancelled", status=499, completion_tokens=3
    )
    life = lifetime_record(1, runtime_id="rt-1", requests=3)
    records: list[UsageRecord] = [request_record(1), _guests(2), orphan, _guests(3), life]
    engine = ledger_and_registry_engine()
    try:
        for index in order:
            if both or index != 1:
                enter(engine, [records[index]])
        hole = [] if both else [("sequence_hole", "activator-1")]
        known = [] if both else [("charged_by_receipt", "req-2")]
        assert _differences(engine, "guest") == hole + known
        assert _differences(engine, "acme") == hole
    finally:
        engine.dispose()
