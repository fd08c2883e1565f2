"""The control routes, for the control plane: bind, sleep, drop, wake, jobs, state, drain, condemn, health; strict."""

from typing import TypeVar, cast

from fastapi import FastAPI, Request, Response

from contracts.jobs import Bind, GateJob, RuntimeState, SealJob
from contracts.wire import decode, encode
from runtime.meters import metrics_of
from runtime.replica import Replica
from service.failures import install_failure_handlers
from telemetry.policy.exposition import CONTENT_TYPE

T = TypeVar("T")


def build_control_app() -> FastAPI:
    """The application without its replica, so that it can be made before a fork; see `attach`."""
    app = FastAPI(openapi_url=None)
    install_failure_handlers(app)

    @app.post("/control/bind")
    async def bind(request: Request) -> Response:
        return _json(await _replica(request).bind(await _body(request, Bind)))

    @app.post("/control/sleep")
    async def sleep(request: Request) -> Response:
        await _replica(request).sleep()
        return Response(status_code=204)

    @app.post("/control/drop")
    async def drop(request: Request) -> Response:
        await _replica(request).drop()
        return Response(status_code=204)

    @app.post("/control/wake")
    async def wake(request: Request) -> Response:
        return _json(await _replica(request).wake(await _body(request, Bind)))

    @app.post("/control/gate")
    async def gate(request: Request) -> Response:
        return _json(await _replica(request).gate(await _body(request, GateJob)))

    @app.post("/control/seal")
    async def seal(request: Request) -> Response:
        return _json(await _replica(request).seal(await _body(request, SealJob)))

    @app.get("/control/state")
    async def state(request: Request) -> Response:
        return _json(_replica(request).report())

    @app.post("/control/drain")
    async def drain(request: Request) -> Response:
        _replica(request).drain()
        return Response(status_code=202)

    @app.post("/control/condemn")
    async def condemn(request: Request) -> Response:
        _replica(request).condemn()
        return Response(status_code=202)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(metrics_of(_replica(request)), media_type=CONTENT_TYPE)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        return Response(status_code=200 if _replica(request).state is RuntimeState.READY else 503)

    app.middleware_stack = app.build_middleware_stack()  # now, not in the first request of each child
    return app


def attach(app: FastAPI, replica: Replica) -> None:
    """From now on the application speaks for this replica."""
    app.state.replica = replica


def _replica(request: Request) -> Replica:
    return cast(Replica, request.app.state.replica)


async def _body(request: Request, kind: type[T]) -> T:
    return decode(await request.body(), kind)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
