"""What a runtime in a pod answers beside requests: probes, and its figures. Nobody tells it anything here: there are no
control routes, since whoever reaches this port could use them.
"""

from typing import Final, cast

from fastapi import FastAPI, Request, Response

from contracts.jobs import RuntimeState
from contracts.wire import encode
from runtime.gpu_watch import GpuWatch
from runtime.meters import metrics_of
from runtime.replica import Replica
from service.failures import install_failure_handlers
from telemetry.policy.exposition import CONTENT_TYPE

NETWORK_PROBE: Final = "k-network-probe"  # knative/serving, pkg/queue/health: the header of probes along the path
QUEUE: Final = "queue"  # what an activator asks for, and reads back
HANGS: Final = "the engine hangs in a step"
_ON_THE_WAY: Final = (RuntimeState.STANDBY, RuntimeState.RESTORING)


def build_probes(step_s: float, gpus: GpuWatch | None = None, *, parks: bool = False) -> FastAPI:
    """Return the probes' application, before it has its replica: see `control_api.attach`.

    An engine without progress for `step_s` seconds hangs: `/healthz` is 503 then, so that the pod is replaced. With
    `parks` the pod counts as fine also while it waits for a version or restores one.
    """
    app = FastAPI(openapi_url=None)

    def moves(request: Request) -> bool:
        return _replica(request).in_step_s < step_s

    def is_ready(request: Request) -> bool:
        return _replica(request).state is RuntimeState.READY and moves(request)

    def is_fine(request: Request) -> bool:
        return is_ready(request) or (parks and _replica(request).state in _ON_THE_WAY)

    install_failure_handlers(app)

    @app.get("/healthz")
    async def healthz(request: Request) -> Response:
        """That it lives and its engine moves; asked by Knative's activator, whether requests may come."""
        asked = request.headers.get(NETWORK_PROBE)
        if asked is None:
            return Response() if moves(request) else Response(HANGS, status_code=503)
        if asked != QUEUE:
            return Response(f"{NETWORK_PROBE} must be {QUEUE}", status_code=400)
        return Response(QUEUE, status_code=200 if is_ready(request) else 503)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """200 while it takes requests or, with `parks`, waits for a version or restores one. The body is its report."""
        status = 200 if is_fine(request) else 503
        return Response(encode(_replica(request).report()), status_code=status, media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(metrics_of(_replica(request), () if gpus is None else gpus.seen), media_type=CONTENT_TYPE)

    return app


def _replica(request: Request) -> Replica:
    return cast(Replica, request.app.state.replica)
