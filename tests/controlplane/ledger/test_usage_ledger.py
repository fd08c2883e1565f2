"""The ledger stores each record once. The writer decides which record is charged, and conflicts are kept."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import inspect, text

from controlplane.db.ledger_migrations import STEPS, NewerLedger
from controlplane.db.ledger_schema import conflicts, lifetime_records, metadata, received, request_records, sources
from controlplane.ledger.usage_batches import MAX_BATCH
from controlplane.ledger.usage_ledger import Appended, Ledger, append_lifetimes, append_requests
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.errors import InvalidRequest, NotFound, Refused
from kelvin.contracts.serving.control_messages import LifetimeBatch, RequestBatch, TimelineAnswer
from kelvin.contracts.timeline import Stage, Stamp
from tests.controlplane.billing_fixture import charged_records, requests, rows
from tests.controlplane.builders import World
from tests.controlplane.usage_records import lifetime_record, request_record

ROOT = Path(__file__).parents[3]

both = pytest.mark.usefixtures("backend")


@both
async def test_stored_record_equals_the_original(ledger: Ledger) -> None:
    """Every field of both kinds is stored in the column of its name."""
    record, lifetime = request_record(1), lifetime_record(1)
    await ledger.append_requests(requests(record))
    await ledger.append_lifetimes(LifetimeBatch(records=(lifetime,)))
    (row,) = await rows(ledger, request_records)
    for field in set(RequestRecord.__struct_fields__) - {"timeline", "once", "degraded"}:
        assert row[field] == getattr(record, field)
    assert (row["timeline"], row["once"], row["degraded"]) == (None, None, None)
    (row,) = await rows(ledger, lifetime_records)
    for field in type(lifetime).__struct_fields__:
        assert row[field] == getattr(lifetime, field)


@both
async def test_repeats_change_nothing(ledger: Ledger) -> None:
    """A repeated batch, an overlapping one and a repeated record in one batch change nothing."""
    for batch in ([1, 2], [1, 2], [2, 3, 3], [1]):
        await ledger.append_requests(requests(*(request_record(number) for number in batch)))
        await ledger.append_lifetimes(LifetimeBatch(records=tuple(lifetime_record(number) for number in batch)))
    assert len(await rows(ledger, request_records)) == 3
    assert len(await rows(ledger, lifetime_records)) == 3
    assert await rows(ledger, conflicts) == []
    assert await rows(ledger, received) == [
        {"source": "activator-1", "first": 1, "last": 3},
        {"source": "supervisor-1", "first": 1, "last": 3},
    ]


ORPHAN = request_record(1, origin=RecordOrigin.ORPHAN, source="rt-1", completion_tokens=64, outcome="cancelled")
RETRIED = request_record(
    1, origin=RecordOrigin.ORPHAN, source="rt-2", runtime_id="rt-2", completion_tokens=9, outcome="cancelled"
)


@pytest.mark.deep
@given(order=st.permutations([request_record(1), ORPHAN, RETRIED, ORPHAN]), split=st.integers(min_value=0, max_value=4))
@settings(max_examples=40)
def test_activator_record_is_charged_before_orphans(
    tmp_path_factory: pytest.TempPathFactory, order: list[RequestRecord], split: int
) -> None:
    """This holds in one batch, too. All orphan records are kept."""

    async def main(ledger: Ledger) -> None:
        for part in (order[:split], order[split:]):
            await ledger.append_requests(requests(*part))
        assert await charged_records(ledger) == {"req-1": ("activator", 7)}
        assert len(await rows(ledger, request_records)) == 3
        assert await rows(ledger, conflicts) == []

    with closing(World(tmp_path_factory.mktemp("ledger"))) as world:
        asyncio.run(main(world.ledger))


@both
async def test_orphan_record_is_charged_until_activators(ledger: Ledger) -> None:
    """The activator's record then stays charged."""
    await ledger.append_requests(requests(RETRIED))
    assert await charged_records(ledger) == {"req-1": ("orphan", 9)}
    await ledger.append_requests(requests(ORPHAN))
    assert await charged_records(ledger) == {"req-1": ("orphan", 64)}
    await ledger.append_requests(requests(request_record(1)))
    await ledger.append_requests(requests(ORPHAN))
    assert await charged_records(ledger) == {"req-1": ("activator", 7)}


@both
async def test_the_same_id_of_two_tenants_is_two_requests(ledger: Ledger) -> None:
    await ledger.append_requests(requests(request_record(1), request_record(2, request_id="req-1", tenant="other")))
    assert sum(row["stands"] for row in await rows(ledger, request_records)) == 2


@both
async def test_contradicting_record_is_kept_aside_once(ledger: Ledger) -> None:
    """The first record stays. The other is set aside with its reason, and its sequence counts as received."""
    await ledger.append_requests(requests(request_record(1)))
    other = request_record(1, sequence=2, completion_tokens=1_000_000)
    await ledger.append_requests(requests(other))
    await ledger.append_requests(requests(other, other))
    assert await charged_records(ledger) == {"req-1": ("activator", 7)}
    (row,) = await rows(ledger, conflicts)
    assert (row["tenant"], row["subject"]) == ("acme", "req-1 (activator-1#2)")
    assert "1000000" in row["record"]
    assert [(row["first"], row["last"]) for row in await rows(ledger, received)] == [(1, 2)]
    await ledger.append_lifetimes(LifetimeBatch(records=(lifetime_record(1), lifetime_record(1, requests=9))))
    assert len(await rows(ledger, conflicts)) == 2
    assert [row["requests"] for row in await rows(ledger, lifetime_records)] == [1]


@both
async def test_sequence_gaps_are_stored_and_filled(ledger: Ledger) -> None:
    """The ledger keeps ranges of received sequences in any order, and the time span of each source."""
    for batch in ([5, 1], [3], [9, 8], [2, 4, 6, 7]):
        await ledger.append_requests(requests(*(request_record(number) for number in batch)))
        if 4 not in batch:
            assert len(await rows(ledger, received)) > 1
    assert await rows(ledger, received) == [{"source": "activator-1", "first": 1, "last": 9}]
    (row,) = await rows(ledger, sources)
    assert (row["first_at_us"], row["last_at_us"]) == (request_record(1).ended_at_us, request_record(9).ended_at_us)


@both
def test_batch_result_counts_each_record(ledger: Ledger) -> None:
    """Each record is new, a duplicate or conflicting."""
    with ledger.database.engine.begin() as connection:
        batch = [request_record(1), request_record(1), request_record(1, status=500), request_record(2)]
        assert append_requests(connection, batch) == Appended(new=2, duplicate=1, conflicting=1)
        lives = [lifetime_record(1), lifetime_record(1), lifetime_record(2, sequence=1)]
        assert append_lifetimes(connection, lives) == Appended(new=1, duplicate=1, conflicting=1)
        assert append_requests(connection, []) == Appended(0, 0, 0)


@both
async def test_a_batch_enters_whole_or_not_at_all(ledger: Ledger) -> None:
    """A failure in the middle leaves nothing, not even the received sequences."""

    def broken() -> None:
        with ledger.database.engine.begin() as connection:
            append_requests(connection, [request_record(1)])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        broken()
    for table in (request_records, received, sources):
        assert await rows(ledger, table) == []


@both
async def test_too_large_a_batch_is_refused(ledger: Ledger) -> None:
    """The error has the number and the limit."""
    many = tuple(request_record(number) for number in range(1, MAX_BATCH + 2))
    with pytest.raises(Refused) as caught:
        await ledger.append_requests(RequestBatch(records=many))
    assert caught.value.failure == InvalidRequest("records", str(MAX_BATCH + 1), f"must be at most {MAX_BATCH}")
    await ledger.append_requests(RequestBatch(records=many[:-1]))
    assert len(await rows(ledger, received)) == 1


STAMPS = (Stamp(Stage.ROUTED, 5), Stamp(Stage.READY, 900), Stamp(Stage.DONE, 1000))


@both
@pytest.mark.parametrize(
    ("stamps", "cold"),
    [
        pytest.param(STAMPS, True, id="a cold start"),
        pytest.param((STAMPS[0], STAMPS[2]), False, id="a failure of a warm replica"),
        pytest.param(None, False, id="no timeline"),
    ],
)
async def test_timeline_of(ledger: Ledger, stamps: tuple[Stamp, ...] | None, cold: bool) -> None:
    """It comes from the charged record. Another tenant's request is not found."""
    fields = {field: getattr(request_record(1), field) for field in RequestRecord.__struct_fields__}
    await ledger.append_requests(requests(RequestRecord(**{**fields, "timeline": stamps}), ORPHAN))
    want = TimelineAnswer(request_id="req-1", model="m", version="f" * 64, cold=cold, stamps=stamps or ())
    assert await ledger.timeline_of("acme", "req-1") == want
    for tenant, request_id in (("other", "req-1"), ("acme", "req-2")):
        with pytest.raises(Refused) as caught:
            await ledger.timeline_of(tenant, request_id)
        assert caught.value.failure == NotFound("request", request_id)


@both
async def test_tables_are_created_once_and_others_refused(tmp_path: Path) -> None:
    """A second start changes nothing. A database of a newer program is refused."""
    with closing(World(tmp_path)) as fresh:
        assert {*metadata.tables} <= {*inspect(fresh.database.engine).get_table_names()}
        await fresh.ledger.append_requests(requests(request_record(1)))
    with closing(World(tmp_path)) as again:
        assert len(await rows(again.ledger, request_records)) == 1
        with again.database.engine.begin() as connection:
            connection.execute(text("INSERT INTO ledger_schema VALUES (:next)"), {"next": len(STEPS) + 1})
    with pytest.raises(NewerLedger):
        World(tmp_path)
