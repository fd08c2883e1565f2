"""Request ids are sortable and unique, and a bad Content-Length is refused."""

import base64
import re
import time

import pytest

from activator.http.exchange import new_request_id
from kelvin.contracts.errors import BodyTooLarge, InvalidRequest, Refused
from tests.activator.exchanges import exchange


def test_request_ids_are_base32_of_time_and_chance() -> None:
    """26 characters decode to 16 bytes. The first six are milliseconds, so later ids sort later."""
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch(r"req_[0-9a-v]{26}", name) for name in ids)
    times = [base64.b32hexdecode(name[4:].upper() + "======")[:6] for name in ids]
    assert times == sorted(times)
    assert abs(int.from_bytes(times[0], "big") / 1000 - time.time()) < 60


@pytest.mark.parametrize(
    ("length", "want"),
    [
        pytest.param(b"11", BodyTooLarge, id="too large"),
        pytest.param(b"1x", InvalidRequest, id="not a number"),
        pytest.param(b"0" * 5000 + b"5", InvalidRequest, id="more digits than Python converts"),
    ],
)
def test_bad_length_of_a_body_is_refused(length: bytes, want: type[Exception]) -> None:
    """The refusal comes before the body is read. Control: a length of ten bytes is accepted."""
    assert exchange(headers=[(b"content-length", b"10")]).body_bound(10) == 10
    with pytest.raises(Refused) as refused:
        exchange(headers=[(b"content-length", length)]).body_bound(10)
    assert isinstance(refused.value.failure, want)
