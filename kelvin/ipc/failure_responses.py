"""Render failures of a FastAPI service as problem details. An unexpected exception is a 500 without details."""

import logging
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kelvin.contracts.errors import Failure, Internal, InvalidRequest, MethodNotAllowed, NotFound, Refused
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, headers_of, problem_details

log = logging.getLogger(__name__)

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def problem_response(failure: Failure) -> Response:
    """Return a response with an RFC 9457 body and the failure's status and headers."""
    return Response(problem_details(failure), failure.status, headers_of(failure), media_type=PROBLEM_CONTENT_TYPE)


def install_failure_handlers(app: FastAPI) -> None:
    """Make every error of `app` a problem details response."""

    @app.exception_handler(Refused)
    async def _refused(_: Request, error: Refused) -> Response:
        return problem_response(error.failure)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            return problem_response(MethodNotAllowed(request.method, _allowed_methods(request)))
        return problem_response(NotFound("route", request.scope["path"]))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return problem_response(InvalidRequest(field, repr(first.get("input"))[:80], str(first["msg"])))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        log.error("unforeseen failure", exc_info=error, extra={"path": request.scope["path"]})
        return problem_response(Internal())


def _allowed_methods(request: Request) -> tuple[str, ...]:
    """Return the methods of all routes at this path. Starlette names only the methods of the first route."""
    routes = request.app.routes
    scopes = {method: dict(request.scope, method=method) for method in _METHODS}
    return tuple(
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    )
