"""Requests that their caller means as one: of those with one `once`, within a day of the first, one is charged.

A right answer before a failed one, then the one that delivered most. What a closed month has charged stays charged:
then nothing more is, unless a later record of that request took the charge back. It depends on the set of records and
on when months were closed, not on the order of arrival.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from contracts.usage import RequestRecord
from controlplane.policy.booking import Booked, book, key_of
from controlplane.policy.month import DAY_US
from controlplane.policy.rating import OK, is_billable
from controlplane.policy.standing import standing

ONCE_US: Final = DAY_US  # from the start of the first one: a later request with that key is another one


@dataclass(frozen=True, slots=True)
class _Request:
    """A request by the record that stands for it; `kept` if a closed month charged it and the charge still holds."""

    request_id: str
    record: RequestRecord
    kept: bool


def book_together(groups: Mapping[str, Sequence[Booked]], closed: Collection[str]) -> dict[str, list[Booked]]:
    """Of one tenant, by request id: all records of requests, and of all that have a `once` in common with them."""
    booked = {request_id: book(group, closed) for request_id, group in groups.items()}
    families: defaultdict[str, list[_Request]] = defaultdict(list)
    for request_id, group in booked.items():
        record = standing([each.record for each in group])
        if once := record.once:
            families[once].append(_Request(request_id, record, _is_kept(group, closed)))
    for family in families.values():
        for window in _windows(family):
            chosen = [request for request in window if request.kept] or [max(window, key=_worth)]
            for request in window:
                if request not in chosen:
                    booked[request.request_id] = _passed_over(booked[request.request_id], closed)
    return booked


def _windows(family: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Those that began within `ONCE_US` of the first; the next after them begins another window."""
    window: list[_Request] = []
    for request in sorted(family, key=lambda each: (each.record.started_at_us, each.request_id)):
        if window and request.record.started_at_us >= window[0].record.started_at_us + ONCE_US:
            yield window
            window = []
        window.append(request)
    if window:
        yield window


def _worth(request: _Request) -> tuple[bool, int, int, str]:
    record = request.record
    return record.outcome == OK, record.completion_tokens, -record.started_at_us, request.request_id


def _is_kept(group: Sequence[Booked], closed: Collection[str]) -> bool:
    taken_back = {each.replaces for each in group if each.stands}
    charged = [each for each in group if each.stands and is_billable(each.record)]
    return any(each.month in closed for each in charged) and any(
        key_of(each.record) not in taken_back for each in charged
    )


def _passed_over(group: Sequence[Booked], closed: Collection[str]) -> list[Booked]:
    """Charge nothing for these records. One that only takes back a closed month's charge stays."""
    return [
        each
        if each.month in closed or (each.replaces is not None and not is_billable(each.record))
        else replace(each, stands=False, replaces=None)
        for each in group
    ]
