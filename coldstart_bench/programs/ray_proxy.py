"""Ray Serve in front of an upstream, as in its documentation: a deployment of one class. Runs in its own Python.

Arguments: port, URL of the upstream, a directory for files and Unix sockets, certificate, key. Ends on SIGTERM.
"""

import logging
import signal
import sys
import threading

import aiohttp
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=1024, logging_config={"enable_access_log": False})
class RayProxy:
    """One replica, whose HTTP client keeps connections open."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        """Return the upstream's response."""
        self._client = self._client or aiohttp.ClientSession()
        sent = await request.body()
        async with self._client.post(self._upstream, data=sent, headers={"content-type": "application/json"}) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")


def main() -> None:
    """Run until SIGTERM. Child processes end with it."""
    port, upstream, at, certificate, key = sys.argv[1:]
    ended = threading.Event()
    ray.init(
        num_cpus=2,  # processes that it may schedule: they share one core
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=at,
        logging_level=logging.WARNING,
    )
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # after ray.init, which sets its own handler
    try:
        serve.start(http_options=HTTPOptions(port=int(port), ssl_certfile=certificate, ssl_keyfile=key))
        serve.run(RayProxy.bind(upstream))  # type: ignore[attr-defined]  # the decorator's; it is not installed with us
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


main()
