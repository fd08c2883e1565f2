"""A refusal has the form of its path, also where nothing but bytes is there to send it."""

import json

import pytest

from activator.refusal import closing
from contracts.traffic_errors import AddressBusy


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        pytest.param(b"/v1/models?x=/admin/", b"application/json", ("error", "code"), id="OpenAI's"),
        pytest.param(b"/nothing", b"application/json", ("error", "code"), id="also of no route"),
        pytest.param(b"/admin/v1/models", b"application/problem+json", ("code",), id="problem details"),
        pytest.param(b"/v2/models/m", b"application/json", ("code",), id="the Open Inference Protocol's"),
    ],
)
def test_closing(path: bytes, kind: bytes, said: tuple[str, ...]) -> None:
    """A whole answer that ends its connection."""
    head, _, body = closing(AddressBusy(2.5), path, "req_1").partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first == b"HTTP/1.1 429 Too Many Requests"
    assert set(lines) == {
        b"x-request-id: req_1", b"content-type: " + kind, b"content-length: %d" % len(body), b"connection: close",
        b"retry-after: 3",
    }  # fmt: skip
    found = json.loads(body)
    for key in said:
        found = found[key]
    assert found == "address_busy"
