"""Describe a service's routes as OpenAPI 3.1: FastAPI's document, completed with our contracts and failures.

Each route declares its responses with `route_docs`. Failures that any call may get before it reaches its route are
listed here once. `build_document` combines both and refuses undescribed routes.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from kelvin.contracts.errors import (
    BodyTooLarge,
    Failure,
    Forbidden,
    Internal,
    InvalidRequest,
    TenantSuspended,
    Unauthenticated,
    Unavailable,
)
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, Problem
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded, TooManyFailures
from kelvin.contracts.wire import encode
from kelvin.ipc.principal import require_scope

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
TEXT: Final = "text/plain"
_SCHEMA_REF: Final = "#/components/schemas/{name}"
_ANSWERS, _SCHEMAS = "x-answers", "x-schemas"  # temporary keys of a route: `build_document` moves their content
# Failures of the activator, of the call to the service, and of reading keys and bodies there.
_COMMON_FAILURES: Final[tuple[type[Failure], ...]] = (
    InvalidRequest, Unauthenticated, Forbidden, TenantSuspended, BodyTooLarge, TooManyFailures, Internal, Overloaded,
    Unavailable, DeadlineExceeded,
)  # fmt: skip


def route_docs(
    kind: Any,
    *refusals: type[Failure],
    status: int = 200,
    media_type: str = JSON,
    extra_responses: Mapping[int, Any] | None = None,
    request_body: Any = None,
    scope: Scope = Scope.ADMIN,
) -> dict[str, Any]:
    """Return arguments for a FastAPI route that answers with `kind` (None: no body) or is refused.

    The types `bytes` and `str` mean bodies that are not JSON. `extra_responses` has responses of other statuses,
    `request_body` the request's type.
    """
    schemas: dict[str, Any] = {}
    answers = {
        str(each): {"description": _about(body_kind), **_content(body_kind, media_type, schemas)}
        for each, body_kind in {status: kind, **(extra_responses or {})}.items()
    }
    extra: dict[str, Any] = {
        _ANSWERS: answers | _refusals(_COMMON_FAILURES + refusals, schemas),
        _SCHEMAS: schemas,
        "security": [{"key": [str(scope)]}],
    }
    if request_body is not None:
        extra["requestBody"] = {"required": True, **_content(request_body, JSON, schemas)}
    return {"openapi_extra": extra}


def build_document(app: FastAPI, title: str) -> dict[str, Any]:
    """Return the document of all routes in FastAPI's schema. Raises KeyError for an undescribed route."""
    found = get_openapi(title=title, version="1", routes=app.routes)
    schemas: dict[str, Any] = {}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if _ANSWERS not in operation:
                raise KeyError(f"{method.upper()} {path} is not described")
            operation["responses"] = operation.pop(_ANSWERS)
            for name, schema in operation.pop(_SCHEMAS).items():
                if schemas.setdefault(name, schema) != schema:
                    raise KeyError(f"two different schemas have the name {name}")
    key = {"type": "http", "scheme": "bearer", "description": "A key, with the scope that is named."}
    found["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": {"key": key}}
    return found


def add_description(app: FastAPI, path: str, title: str, scope: Scope) -> None:
    """Serve the document of `app` at `path`. It includes this route, and is built at the first request."""
    allowed = require_scope(scope)
    made: list[bytes] = []

    @app.get(path, summary="This document", **route_docs(dict[str, Any], scope=scope))
    async def openapi(request: Request) -> Response:
        allowed(request)
        if not made:
            made.append(encode(build_document(app, title)))
        return Response(made[0], media_type=JSON)


def _content(kind: Any, media_type: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the `content` of a body of type `kind`, and add the schemas that it refers to."""
    if kind is None:
        return {}
    if kind is bytes:
        return {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
    if kind is str:
        return {"content": {TEXT: {"schema": {"type": "string"}}}}
    (schema,), components = msgspec.json.schema_components((kind,), ref_template=_SCHEMA_REF)
    schemas.update(components)
    return {"content": {media_type: {"schema": schema}}}


def _refusals(kinds: tuple[type[Failure], ...], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return problem details responses by status, each with its codes."""
    schema = _content(Problem, JSON, schemas)["content"][JSON]["schema"]
    found: dict[str, Any] = {}
    for status in sorted({kind.status for kind in kinds}):
        named = {kind.code: kind for kind in kinds if kind.status == status}
        says = {"properties": {"status": {"const": status}, "code": {"enum": sorted(named)}}}
        found[str(status)] = {
            "description": " ".join(f"`{code}`: {_about(kind)}" for code, kind in sorted(named.items())),
            "content": {PROBLEM_CONTENT_TYPE: {"schema": {"allOf": [schema, says]}}},
        }
    return found


def _about(kind: Any) -> str:
    """Return the first line of our type's docstring as its description."""
    if isinstance(kind, type) and kind.__module__ != "builtins":
        return (kind.__doc__ or "").strip().partition("\n")[0]
    return "Done; nothing is said." if kind is None else "As its schema says."
