"""Internal routes limit request bodies while reading, and decode them strictly."""

from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response

from kelvin.contracts.errors import Refused
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.http_bodies import empty_response, json_response, read_json
from tests.kelvin.ipc.serving import served


def _app() -> FastAPI:
    app = FastAPI()
    install_failure_handlers(app)

    @app.post("/total")
    async def _total(request: Request) -> Response:
        return json_response(sum(await read_json(request, list[int], 8)))

    @app.post("/none")
    async def _none() -> Response:
        return empty_response()

    return app


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param([1, 2, 3], None, id="one that fits"),
        pytest.param([1111, 22, 33], "request_too_large", id="one that doesn't"),
        pytest.param(["1"], "invalid_request", id="another type"),
    ],
)
async def test_request_body_is_decoded_or_refused(tmp_path: Path, body: list[object], code: str | None) -> None:
    """A body is decoded, or refused with a code."""
    async with served(tmp_path, _app()) as service:
        if code is None:
            assert await service.client.call("POST", "/total", int, body=body, timeout_s=5) == 6
            await service.client.call("POST", "/none", type(None), timeout_s=5)
            return
        with pytest.raises(Refused) as refused:
            await service.client.call("POST", "/total", int, body=body, timeout_s=5)
    assert refused.value.failure.code == code
