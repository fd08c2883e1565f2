"""One of the requests with one idempotency key is charged. The set of their records decides which one."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.ledger.policy.booking import IDEMPOTENCY_WINDOW_US, LedgerRecord, mark_charged_by_key
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from tests.controlplane.usage_records import BEGIN_US, HOUR_US, request_record


def at(hours: float, number: int = 0, **other: object) -> RequestRecord:
    """Return a request that starts so many hours later. Its id is `req-HOURS-NUMBER`."""
    started = BEGIN_US + int(hours * HOUR_US)
    values = {"ended_at_us": started + 500, "request_id": f"req-{hours}-{number}", "once": "a", **other}
    return request_record(int(hours * 1000) + number + 1, **values)  # type: ignore[arg-type]


def cut(hours: float, tokens: int, number: int = 0, **other: object) -> RequestRecord:
    """Return a request that failed after so many tokens."""
    return at(hours, number, **{"outcome": "cancelled", "status": 499, "completion_tokens": tokens, **other})


def charged(records: Sequence[RequestRecord], closed: Sequence[LedgerRecord] = ()) -> set[str]:
    """Return the charged request ids. `closed` are records of a closed month."""
    groups: dict[str, list[LedgerRecord]] = {}
    for booked in [*closed, *(LedgerRecord(record, "2026-11") for record in records)]:
        groups.setdefault(booked.record.request_id, []).append(booked)
    found = mark_charged_by_key(groups, {"2026-10"})
    return {request_id for request_id, group in found.items() if any(each.stands for each in group)}


FROZEN = LedgerRecord(at(0, ended_at_us=BEGIN_US - 1, completion_tokens=1), "2026-10", stands=True)
FREE = LedgerRecord(cut(0, 0, ended_at_us=BEGIN_US - 1), "2026-10", stands=True)


@pytest.mark.parametrize(
    ("records", "closed", "want"),
    [
        pytest.param([at(0), at(1)], [], {"req-0-0"}, id="the first of two successful requests"),
        pytest.param([cut(0, 90), at(1)], [], {"req-1-0"}, id="a successful request before a cancelled one"),
        pytest.param([cut(0, 5), cut(1, 9), cut(2, 7)], [], {"req-1-0"}, id="the most tokens if none succeeded"),
        pytest.param([at(0), at(1, once="b")], [], {"req-0-0", "req-1-0"}, id="another key is another request"),
        pytest.param([at(0), at(23.9)], [], {"req-0-0"}, id="within a day"),
        pytest.param([at(0), at(24)], [], {"req-0-0", "req-24-0"}, id="a day later is another window"),
        pytest.param(
            [at(0), at(20), at(30), at(44)], [], {"req-0-0", "req-30-0"}, id="a window starts with the next request"
        ),
        pytest.param(
            [at(0), msgspec.structs.replace(at(1), once=msgspec.UNSET)], [], {"req-0-0", "req-1-0"},
            id="a request without a key is charged by itself",
        ),
        pytest.param([at(1, completion_tokens=99)], [FROZEN], {"req-0-0"}, id="already charged by a closed month"),
        pytest.param([at(1)], [FREE], {"req-0-0", "req-1-0"}, id="a closed month charged zero tokens"),
        pytest.param(
            [cut(0, 64, origin=RecordOrigin.ORPHAN, source="rt-1"), at(1)], [], {"req-1-0"},
            id="an orphan record and a repeat at another activator",
        ),
    ],
)  # fmt: skip
def test_charged_request_of_a_key(records: list[RequestRecord], closed: list[LedgerRecord], want: set[str]) -> None:
    """The order of the records does not matter."""
    assert charged(records, closed) == want
    assert charged(records[::-1], closed) == want


def test_later_record_of_a_request_takes_back_the_charge() -> None:
    """The activator's late record replaces an orphan record of a closed month. The repeat is not charged."""
    orphan = LedgerRecord(
        cut(0, 9, origin=RecordOrigin.ORPHAN, source="rt-1", ended_at_us=BEGIN_US - 1), "2026-10", stands=True
    )
    late, repeat = at(0, source="a-2", sequence=7), at(1)
    groups = {
        late.request_id: [orphan, LedgerRecord(late, "2026-11")],
        repeat.request_id: [LedgerRecord(repeat, "2026-11")],
    }
    found = mark_charged_by_key(groups, {"2026-10"})
    assert [(each.stands, each.replaces) for each in found[late.request_id]] == [
        (True, None),
        (True, ("orphan", "rt-1")),
    ]
    assert [each.stands for each in found[repeat.request_id]] == [False]


@pytest.mark.parametrize("is_late_closed", [False, True])
def test_a_charge_that_was_taken_back_charges_the_repeat(is_late_closed: bool) -> None:
    """A closed month charged an orphan record. The activator's late record says that nothing was delivered."""
    orphan = LedgerRecord(
        cut(0, 9, origin=RecordOrigin.ORPHAN, source="rt-1", ended_at_us=BEGIN_US - 1), "2026-10", stands=True
    )
    late = LedgerRecord(cut(0, 0, source="a-2", sequence=7), "2026-11")
    repeat = LedgerRecord(at(1, number=1), "2026-12")
    closed = {"2026-10"}
    if is_late_closed:
        late, closed = replace(late, stands=True, replaces=("orphan", "rt-1")), {"2026-10", "2026-11"}
    groups = {late.record.request_id: [orphan, late], repeat.record.request_id: [repeat]}
    found = mark_charged_by_key(groups, closed)
    assert [(each.stands, each.replaces) for each in found[late.record.request_id]] == [
        (True, None),
        (True, ("orphan", "rt-1")),
    ]
    assert [each.stands for each in found[repeat.record.request_id]] == [True]
    assert mark_charged_by_key(found, closed) == found


RECORDS = st.lists(
    st.builds(
        cut,
        st.integers(min_value=0, max_value=60),
        st.integers(min_value=0, max_value=3),
        st.integers(min_value=0, max_value=2),
        once=st.sampled_from(["a", "b"]),
        outcome=st.sampled_from(["ok", "cancelled"]),
    ),
    max_size=12,
    unique_by=lambda record: record.request_id,
)


@given(records=RECORDS, data=st.data())
def test_one_request_per_key_and_day_is_charged(records: list[RequestRecord], data: st.DataObject) -> None:
    """The result is the same in any order. Each uncharged request is within a day of a charged one that is no worse."""
    stands = charged(records)
    assert charged(data.draw(st.permutations(records))) == stands
    by_id = {record.request_id: record for record in records}
    for record in records:
        best = [by_id[each] for each in stands if by_id[each].once == record.once]
        near = [each for each in best if abs(each.started_at_us - record.started_at_us) < IDEMPOTENCY_WINDOW_US]
        if record.request_id not in stands:
            assert any(
                (each.outcome == "ok", each.completion_tokens) >= (record.outcome == "ok", record.completion_tokens)
                for each in near
            )
    for once in ("a", "b"):
        begun = sorted(record.started_at_us for record in records if record.once == once)
        windows, edge = 0, -1
        for us in begun:
            if us >= edge:
                windows, edge = windows + 1, us + IDEMPOTENCY_WINDOW_US
        assert sum(by_id[each].once == once for each in stands) == windows
