"""Liveness and readiness on the activator's own Unix socket. Plain ASGI: two routes and nothing else."""

from collections.abc import Callable
from math import isfinite
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from activator.feed import FeedClient
from activator.last_feed import LastFeed
from contracts.wire import Wire, encode

WITHOUT_AUTOSCALER: Final = b"exclude=autoscaler"


class Readiness(Wire, frozen=True):
    """Body of `/readyz`."""

    feed: str  # "live"; "kept" while the control plane is not heard; "none" before it ever was
    age_s: float | None  # since it was last heard
    autoscaler: bool | None = None  # whether Knative's hears us, where it is told what is asked for


def health(ready: Callable[[], bool], open_: Callable[[], bool], told: Callable[[], Readiness]) -> ASGIApp:
    """`/healthz` is 200 once the loop runs; `/readyz` is 200 while `ready()`, else 503, and says what it stands on.

    With `?exclude=autoscaler` (as Kubernetes' own API server has it) it is 200 while `open_()`.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        known = path in ("/healthz", "/readyz")
        asked = open_ if scope["query_string"] == WITHOUT_AUTOSCALER else ready
        status = 404 if not known else 200 if path == "/healthz" or asked() else 503
        body = encode(told()) if path == "/readyz" else b""
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers[: 2 if body else 1]})
        await send({"type": "http.response.body", "body": body})

    return app


def readiness(feed: FeedClient, last: LastFeed, autoscaler: bool | None = None) -> Readiness:
    """Of the moment."""
    age_s = last.age_s()
    if not isfinite(age_s):
        return Readiness(feed="none", age_s=None, autoscaler=autoscaler)
    return Readiness(feed="live" if feed.connected else "kept", age_s=round(age_s, 1), autoscaler=autoscaler)
