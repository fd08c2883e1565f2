"""An error response has the format of its path, even when it is sent as raw bytes."""

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.types import Message

from activator.accounting.metrics import RequestMetrics
from activator.api.front_door import FrontDoorApp
from activator.http.client_connection import EXTENSION
from activator.http.error_response import closing_response
from activator.http.exchange import ARRIVAL_KEY, REQUEST_ID_KEY, Exchange, RequestLimits, read_clocks_us
from activator.routing.request_routes import ListModels
from kelvin.contracts.errors import Refused, Unauthenticated
from kelvin.contracts.traffic_errors import AddressBusy
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.exchanges import FakeConnection


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        pytest.param(b"/v1/models?x=/admin/", b"application/json", ("error", "code"), id="OpenAI format"),
        pytest.param(b"/nothing", b"application/json", ("error", "code"), id="OpenAI format for an unknown route"),
        pytest.param(
            b"/admin/v1/models", b"application/problem+json", ("code",), id="problem details of the admin API"
        ),
        pytest.param(b"/v2/models/m", b"application/json", ("code",), id="Open Inference Protocol format"),
    ],
)
def test_raw_error_response_closes_its_connection(path: bytes, kind: bytes, said: tuple[str, ...]) -> None:
    head, _, body = closing_response(AddressBusy(2.5), path, "req_1").partition(b"\r\n\r\n")
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


class Broken:
    """A handler that raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def send_models(self, exchange: Exchange, request_route: ListModels) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "want"),
    [
        pytest.param(Refused(Unauthenticated()), ("invalid_api_key", "401"), id="control: a refusal"),
        pytest.param(KeyError("x"), ("internal", "500"), id="a defect"),
        pytest.param(asyncio.CancelledError(), ("unavailable", "503"), id="a drain"),
    ],
)
async def test_every_refusal_at_the_door_is_counted(error: BaseException, want: tuple[str, str]) -> None:
    """The metric has the code and the status."""
    page, said = MetricsPage("test"), list[Message]()
    limits = RequestLimits(1, 1, 1, 1.0, 1.0, 1.0, requests=1)
    none = cast(Any, None)
    door = FrontDoorApp(none, cast(Any, Broken(error)), none, none, "kelvin.localhost", limits, RequestMetrics(page))

    async def send(message: Message) -> None:
        said.append(message)

    scope = {
        "method": "GET", "raw_path": b"/v1/models", "query_string": b"", "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1), "extensions": {EXTENSION: FakeConnection()},
        ARRIVAL_KEY: read_clocks_us(), REQUEST_ID_KEY: "req_1",
    }  # fmt: skip
    await door(scope, none, send)
    assert said[0]["status"] == int(want[1])
    (family,) = [each for each in page.families() if each.name == "kelvin_refusals_total"]
    assert family.values == {want: 1}
