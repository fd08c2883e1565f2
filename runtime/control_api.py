"""What a runtime answers beside requests: its control routes; or in a pod probes; and its figures.

Control routes are for the control plane: bind, sleep, drop, wake, jobs, state, drain, condemn, health; strict. A pod
has none, since whoever reaches its port could use them: nobody tells it anything here.

Figures are a replica's own, read when it is asked. They are gauges, as they end with it; other processes count.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, TypeVar, cast

from fastapi import FastAPI, Request, Response

from contracts.gpu import Degraded, GpuFacts, Healthy, Unhealthy, judge
from contracts.jobs import Bind, GateJob, RuntimeState, SealJob
from contracts.wire import decode, encode
from runtime.gpu_watch import GpuWatch
from runtime.replica import Replica
from service.failures import install_failure_handlers
from telemetry.policy.exposition import CONTENT_TYPE
from telemetry.policy.instruments import Kind, Page, by
from telemetry.telemetry import local

T = TypeVar("T")
Values = dict[tuple[str, ...], float]
_HEALTH: Final = {Healthy: "healthy", Degraded: "degraded", Unhealthy: "unhealthy"}
NETWORK_PROBE: Final = "k-network-probe"  # knative/serving, pkg/queue/health: the header of probes along the path
QUEUE: Final = "queue"  # what an activator asks for, and reads back
HANGS: Final = "the engine hangs in a step"
_ON_THE_WAY: Final = (RuntimeState.STANDBY, RuntimeState.RESTORING)


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


def attach(app: FastAPI, replica: Replica) -> None:
    """From now on the application speaks for this replica."""
    app.state.replica = replica


def _replica(request: Request) -> Replica:
    return cast(Replica, request.app.state.replica)


async def _body(request: Request, kind: type[T]) -> T:
    return decode(await request.body(), kind)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


def metrics_of(replica: Replica, gpus: Sequence[GpuFacts] = ()) -> str:
    """As Prometheus reads it. Replicas are added up where several are asked, so no name is a label."""
    report = replica.report()
    telemetry = local("runtime")
    blocks = (("free", report.kv_blocks_free), ("used", report.kv_blocks_total - report.kv_blocks_free))
    telemetry.page.read("kelvin_kv_blocks", "KV blocks.", Kind.GAUGE, ("state",), lambda: by(blocks))
    sequences = (("running", report.running), ("waiting", report.waiting))
    telemetry.page.read("kelvin_sequences", "Sequences in engines.", Kind.GAUGE, ("state",), lambda: by(sequences))
    if gpus:
        _describe(telemetry.page, gpus)
    return telemetry.text()


def _describe(page: Page, gpus: Sequence[GpuFacts]) -> None:
    """What a device doesn't say has no series."""
    states = {gpu.name: _HEALTH[type(judge(gpu))] for gpu in gpus}
    health: Values = {
        (gpu, state): float(state == found) for gpu, found in states.items() for state in _HEALTH.values()
    }
    memory: Values = {
        (gpu.name, state): float(value)
        for gpu in gpus
        for state, value in (("used", gpu.memory_used_bytes), ("total", gpu.memory_total_bytes))
        if value is not None
    }
    warmth = _known({gpu.name: gpu.temperature_c for gpu in gpus})
    errors = _known({gpu.name: gpu.uncorrected for gpu in gpus})
    xids = _known({gpu.name: len(gpu.xids) for gpu in gpus})
    for name, what, labels, values in (
        ("kelvin_gpu_health", "1 for the state that a GPU is in.", ("gpu", "state"), health),
        ("kelvin_gpu_memory_bytes", "A GPU's memory.", ("gpu", "state"), memory),
        ("kelvin_gpu_temperature_celsius", "How warm a GPU is.", ("gpu",), warmth),
        ("kelvin_gpu_uncorrected_errors", "ECC errors since its driver was loaded.", ("gpu",), errors),
        ("kelvin_gpu_xids", "Different XIDs since the start.", ("gpu",), xids),
    ):
        page.read(name, what, Kind.GAUGE, labels, partial(dict, values))


def _known(values: Mapping[str, int | None]) -> Values:
    return by((gpu, float(value)) for gpu, value in values.items() if value is not None)
