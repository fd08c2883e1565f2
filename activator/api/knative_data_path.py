"""Stand in for Knative's own activator: serve requests that arrive on Knative's data path.

The ingress's headers name a Revision (`routing/policy/knative_headers.py`). The request then is one for that version,
and enters the front door with its API key, like any other. Probes are answered here.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from activator.http.error_response import render_error
from activator.http.exchange import REQUEST_ID_KEY
from activator.routing.policy.knative_headers import ProbeResponse, parse_revision, respond_to_probe
from activator.routing.revisions import Revisions
from kelvin.contracts.errors import ModelNotFound


class KnativeDataPath:
    """An ASGI application in front of the front door."""

    def __init__(self, front_door: ASGIApp, revisions: Revisions, is_ready: Callable[[], bool]) -> None:
        self._front_door = front_door
        self._revisions = revisions
        self._is_ready = is_ready

    def __repr__(self) -> str:
        return f"<KnativeDataPath {self._revisions}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        probe_response = respond_to_probe(headers, is_ready=self._is_ready())
        if probe_response is not None:
            await _respond(scope, send, probe_response)
            return
        revision = parse_revision(headers)
        key = None if revision is None else self._revisions.find_version(*revision)
        if key is None:
            failure = ModelNotFound("a Revision" if revision is None else f"{revision[0][:63]}/{revision[1][:63]}")
            status, kind, body, more = render_error(failure, scope["raw_path"], scope[REQUEST_ID_KEY])
            await _respond(scope, send, ProbeResponse(status, body, ((b"content-type", kind), *more)))
            return
        # The same form as in a public path. The front door refuses a body that names another model.
        raw_path = f"/{key.tenant}/{key.model}@{key.version}".encode() + scope["raw_path"]
        await self._front_door({**scope, "raw_path": raw_path, "path": raw_path.decode("latin-1")}, receive, send)


async def _respond(scope: Scope, send: Send, probe_response: ProbeResponse) -> None:
    named, length = (
        (b"x-request-id", scope[REQUEST_ID_KEY].encode()),
        (b"content-length", b"%d" % len(probe_response.body)),
    )
    headers = [named, length, *probe_response.headers]
    await send({"type": "http.response.start", "status": probe_response.status, "headers": headers})
    await send({"type": "http.response.body", "body": probe_response.body, "more_body": False})
