"""Each request is charged once. The activator's record is charged before orphan records, in any order of arrival."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.ledger.policy.record_precedence import (
    RecordConflict,
    RecordStatus,
    choose_charged_record,
    decide_lifetime_record,
    decide_request_record,
)
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from tests.controlplane.usage_records import lifetime_record, request_record


def orphan(number: int, **other: object) -> RequestRecord:
    values = {"source": "rt-1", "runtime_id": "rt-1", "completion_tokens": 5, **other}
    return request_record(number, origin=RecordOrigin.ORPHAN, **values)  # type: ignore[arg-type]


SAYS_ELSE = RecordConflict("another record of this request by the same kind of writer says something else")


@pytest.mark.parametrize(
    ("known", "record", "taken", "want"),
    [
        pytest.param([], request_record(1), False, RecordStatus.NEW, id="the first record"),
        pytest.param([request_record(1)], request_record(1), True, RecordStatus.DUPLICATE, id="an exact repeat"),
        pytest.param([orphan(1)], request_record(1), False, RecordStatus.NEW, id="an activator's beside an orphan's"),
        pytest.param([request_record(1)], orphan(1), False, RecordStatus.NEW, id="an orphan's beside an activator's"),
        pytest.param(
            [orphan(1)], orphan(1, source="rt-2", runtime_id="rt-2"), False, RecordStatus.NEW,
            id="orphans of two runtimes",
        ),
        pytest.param(
            [request_record(1), orphan(1)], orphan(1), True, RecordStatus.DUPLICATE, id="a repeat of the orphan's"
        ),
        pytest.param([request_record(1)], request_record(1, completion_tokens=9), True, SAYS_ELSE, id="other tokens"),
        pytest.param([request_record(1)], request_record(1, source="a-2"), False, SAYS_ELSE, id="by another activator"),
        pytest.param([orphan(1)], orphan(1, completion_tokens=9), True, SAYS_ELSE, id="an orphan's with other tokens"),
        pytest.param(
            [], request_record(1, status=2**31), False, RecordConflict("status is 2147483648"), id="a bad status"
        ),
        pytest.param(
            [], request_record(1, model="m" * 128), False, RecordConflict("model has 128 characters"),
            id="a name that is too long",
        ),
        pytest.param(
            [], request_record(1, model=f"{'o' * 63}/{'m' * 63}"), False, RecordStatus.NEW, id="another tenant's model"
        ),
        pytest.param(
            [], request_record(1), True, RecordConflict("its source used this sequence for another record"),
            id="a sequence used twice",
        ),
        pytest.param(
            [], request_record(1, device_us=-1), False, RecordConflict("device_us is -1"), id="a negative figure"
        ),
        pytest.param(
            [], request_record(1, prompt_tokens=2**60), False, RecordConflict(f"prompt_tokens is {2**60}"),
            id="an impossible figure",
        ),
        pytest.param(
            [], request_record(1, prompt_tokens=3, cached_tokens=4), False,
            RecordConflict("4 cached of 3 prompt tokens"), id="more cached than prompt tokens",
        ),
        pytest.param(
            [], request_record(1, prompt_tokens=4, cached_tokens=4), False, RecordStatus.NEW, id="all of it cached"
        ),
        pytest.param(
            [], request_record(1, sequence=0), False, RecordConflict("sequence 0"), id="sequences begin at one"
        ),
    ],
)  # fmt: skip
def test_place_request(known: list[RequestRecord], record: RequestRecord, taken: bool, want: object) -> None:
    """A record is new, a duplicate, or a conflict with its reason."""
    assert decide_request_record(known, record, sequence_taken=taken) == want


def test_place_lifetime() -> None:
    """Each runtime has one lifetime record."""
    record = lifetime_record(1)
    assert decide_lifetime_record(None, record, sequence_taken=False) is RecordStatus.NEW
    assert decide_lifetime_record(record, record, sequence_taken=True) is RecordStatus.DUPLICATE
    assert decide_lifetime_record(record, lifetime_record(1, requests=2), sequence_taken=True) == RecordConflict(
        "another record of this runtime says something else"
    )
    assert decide_lifetime_record(None, record, sequence_taken=True) == RecordConflict(
        "its source used this sequence for another record"
    )
    assert decide_lifetime_record(
        None, lifetime_record(1, idle_us=-5, total_us=9), sequence_taken=False
    ) == RecordConflict("idle_us is -5")
    assert decide_lifetime_record(None, lifetime_record(1, sequence=0), sequence_taken=False) == RecordConflict(
        "sequence 0"
    )


@dataclass(frozen=True, slots=True)
class Case:
    claim: str
    records: list[RequestRecord]
    stands: int


CASES = [
    Case("the only one", [request_record(1)], 0),
    Case(
        "the activator's over an orphan's that delivered more", [orphan(1, completion_tokens=99), request_record(1)], 1
    ),
    Case(
        "of two orphans' the one that delivered more",
        [orphan(1), orphan(1, source="rt-2", runtime_id="rt-2", completion_tokens=6)],
        1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.claim)
@given(data=st.data())
def test_charged_record_is_independent_of_order(case: Case, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(case.records))
    assert choose_charged_record(shuffled) == case.records[case.stands]


def test_records_compare_by_value() -> None:
    record = request_record(1)
    assert msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord) == record
