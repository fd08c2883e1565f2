"""Render a failure for a caller. The path decides the format. Failures go through an exchange, or as bare HTTP/1.1."""

from http import HTTPStatus
from typing import Final

from activator.http.exchange import Headers
from activator.routing.request_routes import speaks_open_inference
from kelvin.contracts.errors import Failure
from kelvin.contracts.problem import (
    OPENAI_CONTENT_TYPE,
    PROBLEM_CONTENT_TYPE,
    headers_of,
    open_inference_error,
    openai_error,
    problem_details,
)

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nx-request-id: %b\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_MALFORMED: Final = (
    b"HTTP/1.1 400 Bad Request\r\nx-request-id: %b\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)


def render_error(failure: Failure, path: bytes, request_id: str) -> tuple[int, bytes, bytes, Headers]:
    """Return status, content type, body and headers of a failure, without the header that names the request.

    The format is (1) problem details for `/admin/` and `/push/`, (2) the Open Inference Protocol's for its paths, also
    unknown ones, (3) OpenAI's for everything else.
    """
    status = failure.status
    headers: Headers = [(key.encode(), value.encode()) for key, value in headers_of(failure).items()]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # (1)
    if path.startswith((b"/admin/", b"/push/")):
        return status, PROBLEM_CONTENT_TYPE.encode(), problem_details(failure), headers
    # (2) (3)
    render = open_inference_error if speaks_open_inference(path) else openai_error
    return status, OPENAI_CONTENT_TYPE.encode(), render(failure, request_id), headers


def closing_response(failure: Failure, path: bytes, request_id: str) -> bytes:
    """Return a complete HTTP/1.1 error that closes the connection. The application has not seen the request."""
    status, content_type, body, headers = render_error(failure, path, request_id)
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(),
        b"x-request-id: " + request_id.encode(),
        b"content-type: " + content_type,
        b"content-length: %d" % len(body),
        b"connection: close",
        *(name + b": " + value for name, value in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def head_too_large_response(request_id: str) -> bytes:
    """Return a complete 431 response that closes the connection. The head was not parsed."""
    return _TOO_LARGE % request_id.encode()


def malformed_response(why: bytes, request_id: str) -> bytes:
    """Return a complete 400 response that closes the connection, for bytes that are no valid request."""
    return _MALFORMED % (request_id.encode(), len(why), why)
