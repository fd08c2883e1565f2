"""Liveness and readiness on the activator's own Unix socket. Plain ASGI: two routes and nothing else."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send


def health(ready: Callable[[], bool]) -> ASGIApp:
    """`/healthz` is 200 once the loop runs; `/readyz` is 200 while `ready()`, else 503."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        known = path in ("/healthz", "/readyz")
        status = 404 if not known else 200 if path == "/healthz" or ready() else 503
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return app
