"""The OpenAPI document of a service: every route with all its responses, and schema names that are unique."""

from typing import Any

import pytest
from fastapi import FastAPI, Response

from kelvin.contracts.errors import Conflict, NotFound
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.wire import Wire
from kelvin.ipc.openapi import add_description, build_document, route_docs


class Wanted(Wire, frozen=True):
    """A request body of one field."""

    name: str


class Made(Wire, frozen=True):
    """A response body that may contain a `Wanted`."""

    name: str
    of: Wanted | None = None


def app() -> FastAPI:
    """Return an application with one route and the document's own."""
    made = FastAPI(openapi_url=None)
    arguments = route_docs(
        Made, NotFound, Conflict, status=201, extra_responses={202: None}, request_body=Wanted, scope=Scope.PUSH
    )

    @made.post("/things/{thing}", **arguments)
    async def make(thing: str) -> Response:
        raise NotImplementedError(thing)

    add_description(made, "/openapi.json", "Things", Scope.PUSH)
    return made


def test_a_route_is_described() -> None:
    """A route has its body, responses, refusals by status with their codes, and its scope."""
    document = build_document(app(), "Things")
    operation = document["paths"]["/things/{thing}"]["post"]
    assert operation["security"] == [{"key": ["push"]}]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Wanted"}
    assert operation["responses"]["201"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Made"
    }
    assert "content" not in operation["responses"]["202"]
    assert set(operation["responses"]) == {
        "201", "202", "400", "401", "403", "404", "409", "413", "429", "500", "503", "504",
    }  # fmt: skip
    _, says = operation["responses"]["403"]["content"]["application/problem+json"]["schema"]["allOf"]
    assert says["properties"]["code"] == {"enum": ["insufficient_scope", "tenant_suspended"]}
    assert set(document["components"]["schemas"]) == {"Made", "Problem", "Wanted"}
    assert document["components"]["schemas"]["Made"]["additionalProperties"] is False
    assert "/openapi.json" in document["paths"]


def test_undescribed_route_is_an_error() -> None:
    """It is an error, and is neither left out nor described by FastAPI's guess."""
    made = app()

    @made.get("/silent")
    async def silent() -> Response:
        raise NotImplementedError

    with pytest.raises(KeyError, match="GET /silent is not described"):
        build_document(made, "Things")


def test_two_types_of_one_name_are_refused() -> None:
    """Two types of one name would share a schema."""
    made, other = app(), type("Made", (Wire,), {"__annotations__": {"size": int}}, frozen=True)

    @made.get("/other", **route_docs(other))
    async def another() -> Response:
        raise NotImplementedError

    with pytest.raises(KeyError, match="name Made"):
        build_document(made, "Things")


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [pytest.param(bytes, "application/octet-stream", id="bytes"), pytest.param(str, "text/plain", id="text")],
)
def test_non_json_body_has_its_media_type(kind: Any, media_type: str) -> None:
    answers = route_docs(kind)["openapi_extra"]["x-answers"]
    assert list(answers["200"]["content"]) == [media_type]
