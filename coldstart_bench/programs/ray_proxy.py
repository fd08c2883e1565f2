"""Ray Serve in front of an upstream, as its documentation makes a deployment of one class; has a Python of its own.

Arguments: port, upstream's URL, a directory for its files (Unix sockets among them), certificate, key. Ends with
SIGTERM.
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
    """One replica, with a client that keeps its connections."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        """The upstream's answer."""
        self._client = self._client or aiohttp.ClientSession()
        sent = await request.body()
        async with self._client.post(self._upstream, data=sent, headers={"content-type": "application/json"}) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")


def main() -> None:
    """Until it is told to end; what it started ends with it."""
    port, upstream, at, certificate, key = sys.argv[1:]
    ended = threading.Event()
    ray.init(
        num_cpus=2,  # processes that it may plan for: they share the one core that they are given
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=at,
        logging_level=logging.WARNING,
    )
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # ray.init takes it, too
    try:
        serve.start(http_options=HTTPOptions(port=int(port), ssl_certfile=certificate, ssl_keyfile=key))
        serve.run(RayProxy.bind(upstream))  # type: ignore[attr-defined]  # the decorator's; it is not installed with us
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


main()
