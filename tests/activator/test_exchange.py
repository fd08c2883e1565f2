"""A request's own name: sortable, of the documented form, never twice."""

import base64
import re
import time

from activator.exchange import new_request_id


def test_request_ids_are_base32_of_time_and_chance() -> None:
    """26 characters that decode to 16 bytes whose first six are milliseconds; later ones sort later."""
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch(r"req_[0-9a-v]{26}", name) for name in ids)
    times = [base64.b32hexdecode(name[4:].upper() + "======")[:6] for name in ids]
    assert times == sorted(times)
    assert abs(int.from_bytes(times[0], "big") / 1000 - time.time()) < 60
