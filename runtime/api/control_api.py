"""Serve all routes except inference: control orders, a pod's probes, a parked pod's orders, and metrics.

The control plane uses the routes below `/control`: bind, sleep, drop, wake, gate, seal, state, drain, condemn. A pod
has none of them, because every process that reaches its port could call them. A parked pod accepts bind, release and
state, and only from the control plane.

All metrics are gauges of this replica. They are computed for each scrape and disappear with the process. Counters live
in other processes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, cast

from fastapi import FastAPI, Request, Response

from kelvin.contracts.artifacts.runtime_control import (
    BindPodRequest,
    BindRequest,
    BindResponse,
    GateJob,
    ParkedSpec,
    RuntimeState,
    SealJob,
)
from kelvin.contracts.errors import CapacityExceeded, Conflict, InvalidRequest, Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.devices.gpu_policy import DegradedGpu, GpuFacts, HealthyGpu, UnhealthyGpu, judge_gpu_health
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.http_bodies import LARGE_BYTES, json_response, read_json
from kelvin.telemetry.policy.exposition import CONTENT_TYPE
from kelvin.telemetry.policy.instruments import MetricKind, MetricsPage, series_by_label
from kelvin.telemetry.telemetry import open_without_traces
from runtime.lifecycle.gpu_watch import GpuWatch
from runtime.lifecycle.replica import RuntimeReplica

Values = dict[tuple[str, ...], float]
_HEALTH: Final = {HealthyGpu: "healthy", DegradedGpu: "degraded", UnhealthyGpu: "unhealthy"}
NETWORK_PROBE: Final = "k-network-probe"  # knative/serving, pkg/queue/health: the header of probes along the path
QUEUE_PROBE: Final = "queue"  # the header's value, which Knative's activator expects back as the body
ENGINE_HANGS: Final = "the engine hangs in a step"
_STARTING_STATES: Final = (RuntimeState.STANDBY, RuntimeState.RESTORING)


def build_control_app() -> FastAPI:
    """Return the control application. `attach_replica` adds the replica, after a fork."""
    app = FastAPI(openapi_url=None)
    install_failure_handlers(app)

    @app.post("/control/bind")
    async def bind(request: Request) -> Response:
        return json_response(await _replica(request).bind(await read_json(request, BindRequest)))

    @app.post("/control/sleep")
    async def sleep(request: Request) -> Response:
        await _replica(request).sleep()
        return Response(status_code=204)

    @app.post("/control/drop")
    async def drop(request: Request) -> Response:
        await _replica(request).release_weights()
        return Response(status_code=204)

    @app.post("/control/wake")
    async def wake(request: Request) -> Response:
        return json_response(await _replica(request).wake(await read_json(request, BindRequest)))

    @app.post("/control/gate")
    async def gate(request: Request) -> Response:
        return json_response(await _replica(request).gate(await read_json(request, GateJob, LARGE_BYTES)))

    @app.post("/control/seal")
    async def seal(request: Request) -> Response:
        return json_response(await _replica(request).seal(await read_json(request, SealJob)))

    @app.get("/control/state")
    async def state(request: Request) -> Response:
        return json_response(_replica(request).report())

    @app.post("/control/drain")
    async def drain(request: Request) -> Response:
        _replica(request).drain()
        return Response(status_code=202)

    @app.post("/control/condemn")
    async def condemn(request: Request) -> Response:
        _replica(request).stop_damaged()
        return Response(status_code=202)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(render_metrics(_replica(request)), media_type=CONTENT_TYPE)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        return Response(status_code=200 if _replica(request).state is RuntimeState.READY else 503)

    app.middleware_stack = app.build_middleware_stack()  # now, not in the first request of each child
    return app


def build_probe_app(step_s: float, gpus: GpuWatch | None = None, *, may_park: bool = False) -> FastAPI:
    """Return the probe application. `attach_replica` adds the replica.

    An engine without progress for `step_s` seconds hangs. `/healthz` is then 503, so that the pod is replaced. With
    `may_park`, the pod is also ready while it waits for a version or restores one.
    """
    app = FastAPI(openapi_url=None)

    def is_progressing(request: Request) -> bool:
        return _replica(request).stalled_s < step_s

    def is_ready(request: Request) -> bool:
        return _replica(request).state is RuntimeState.READY and is_progressing(request)

    def is_ready_or_parked(request: Request) -> bool:
        return is_ready(request) or (may_park and _replica(request).state in _STARTING_STATES)

    install_failure_handlers(app)

    @app.get("/healthz")
    async def healthz(request: Request) -> Response:
        """Return 200 while the engine progresses. For a probe by Knative's activator: while requests are accepted."""
        probe = request.headers.get(NETWORK_PROBE)
        if probe is None:
            return Response() if is_progressing(request) else Response(ENGINE_HANGS, status_code=503)
        if probe != QUEUE_PROBE:
            return Response(f"{NETWORK_PROBE} must be {QUEUE_PROBE}", status_code=400)
        return Response(QUEUE_PROBE, status_code=200 if is_ready(request) else 503)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Return 200 while requests are accepted. With `may_park`, also while the pod waits for a version or restores
        one. The body is the replica's report.
        """
        status = 200 if is_ready_or_parked(request) else 503
        return json_response(_replica(request).report(), status)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(
            render_metrics(_replica(request), () if gpus is None else gpus.last_facts), media_type=CONTENT_TYPE
        )

    return app


class BindHandler:
    """The orders to a parked pod. Its process binds one version, once. A second order for that version gets the same
    reply. An order for another version is refused until a fresh process is parked. A bind continues after its caller
    has disconnected. It ends within `bind_timeout_s` seconds, with a ready or a failed replica.
    """

    def __init__(self, parked: ParkedSpec, replica: RuntimeReplica, stop: asyncio.Event, bind_timeout_s: float) -> None:
        """Setting `stop` makes the process drain and exit. The pod's supervisor then starts a fresh process."""
        self._parked = parked
        self._replica = replica
        self._stop = stop
        self._bind_timeout_s = bind_timeout_s
        self._bound_order: BindPodRequest | None = None
        self._binding: asyncio.Task[BindResponse] | None = None

    def __repr__(self) -> str:
        state = "parked" if self._bound_order is None else self._bound_order.version[:12]
        return f"<BindHandler {state} {self._replica!r}>"

    async def bind(self, order: BindPodRequest) -> BindResponse:
        """Bind the version and return the reply. Cancelling a caller does not stop the bind.

        Raises `Refused`. Four failures change nothing: InvalidRequest and CapacityExceeded (the version does not fit
        here), Conflict (another version is bound, or the replica drains) and Unavailable (the process is about to end).
        Any other failure is the reason why the process has failed.
        """
        if self._bound_order is None:
            self._check(order)
            if self._stop.is_set():
                raise Refused(Unavailable("this pod"))
            self._bound_order = order
            self._binding = asyncio.create_task(self._bind(order), name="bind")
            self._binding.add_done_callback(_retrieve_exception)
        elif not _is_same_version(self._bound_order, order):
            raise Refused(Conflict("version", "another one is bound here; it must be released first"))
        elif self._replica.failure is not None:
            raise Refused(self._replica.failure)
        elif self._replica.state is RuntimeState.DRAINING:
            raise Refused(Unavailable("this pod"))
        assert self._binding is not None
        return await asyncio.shield(self._binding)

    def release(self, order: BindPodRequest) -> bool:
        """Make the process drain and exit. Return False if nothing is bound. Raises `Refused(Conflict)`."""
        if self._bound_order is None:
            return False
        if not _is_same_version(self._bound_order, order):
            raise Refused(Conflict("version", "another one is bound here"))
        self._stop.set()
        return True

    async def _bind(self, order: BindPodRequest) -> BindResponse:
        parked = self._parked
        bind = BindRequest(
            tenant=order.tenant,
            model=order.model,
            version=order.version,
            device_class=parked.device_class,
            threads=parked.threads,
            kv_bytes=parked.kv_bytes,
        )
        try:
            async with asyncio.timeout(self._bind_timeout_s):
                return await self._replica.bind(bind)
        except TimeoutError:
            failure = DeadlineExceeded(self._bind_timeout_s, "restoring the version")
            self._replica.fail(failure)
            raise Refused(failure) from None

    def _check(self, order: BindPodRequest) -> None:
        parked = self._parked
        if order.device_class != parked.device_class:
            raise Refused(
                InvalidRequest("device_class", order.device_class[:80], f"must be {parked.device_class} here")
            )
        if order.store != parked.store:
            raise Refused(InvalidRequest("store", order.store[:200], "must be the store that this pod reads"))
        if parked.weight_bytes and order.weight_bytes > parked.weight_bytes:
            raise Refused(CapacityExceeded("this pod", order.weight_bytes, parked.weight_bytes))


def build_bind_api(handler: BindHandler, replica: RuntimeReplica) -> FastAPI:
    """Return the application with a parked pod's orders. Its listener must authenticate the caller."""
    app = FastAPI(openapi_url=None)
    install_failure_handlers(app)

    @app.post("/control/bind")
    async def bind(request: Request) -> Response:
        return json_response(await handler.bind(await read_json(request, BindPodRequest)))

    @app.post("/control/release")
    async def release(request: Request) -> Response:
        return Response(status_code=202 if handler.release(await read_json(request, BindPodRequest)) else 204)

    @app.get("/control/state")
    async def state() -> Response:
        return json_response(replica.report())

    return app


def _is_same_version(first: BindPodRequest, second: BindPodRequest) -> bool:
    """Return whether both orders name the same version. The other fields describe what the version needs."""
    return (first.tenant, first.model, first.version) == (second.tenant, second.model, second.version)


def _retrieve_exception(task: "asyncio.Task[BindResponse]") -> None:
    """Retrieve the exception, or asyncio logs it when no caller is left. The replica has recorded the failure."""
    if not task.cancelled():
        task.exception()


def attach_replica(app: FastAPI, replica: RuntimeReplica) -> None:
    """Set the replica that the application's routes use."""
    app.state.replica = replica


def _replica(request: Request) -> RuntimeReplica:
    return cast(RuntimeReplica, request.app.state.replica)


def render_metrics(replica: RuntimeReplica, gpus: Sequence[GpuFacts] = ()) -> str:
    """Return the metrics in Prometheus' text format. Callers sum over replicas, so no series has a replica label."""
    report = replica.report()
    telemetry = open_without_traces("runtime")
    blocks = (("free", report.kv_blocks_free), ("used", report.kv_blocks_total - report.kv_blocks_free))
    telemetry.page.callback(
        "kelvin_kv_blocks", "KV blocks.", MetricKind.GAUGE, ("state",), lambda: series_by_label(blocks)
    )
    sequences = (("running", report.running), ("waiting", report.waiting))
    telemetry.page.callback(
        "kelvin_sequences", "Requests in the engine.", MetricKind.GAUGE, ("state",), lambda: series_by_label(sequences)
    )
    if gpus:
        _add_gpu_metrics(telemetry.page, gpus)
    return telemetry.render_page()


def _add_gpu_metrics(page: MetricsPage, gpus: Sequence[GpuFacts]) -> None:
    """Add the GPUs' series. A value that a device doesn't report gets no sample."""
    states = {gpu.name: _HEALTH[type(judge_gpu_health(gpu))] for gpu in gpus}
    health: Values = {
        (gpu, state): float(state == current) for gpu, current in states.items() for state in _HEALTH.values()
    }
    memory: Values = {
        (gpu.name, state): float(value)
        for gpu in gpus
        for state, value in (("used", gpu.memory_used_bytes), ("total", gpu.memory_total_bytes))
        if value is not None
    }
    temperatures = _reported_values({gpu.name: gpu.temperature_c for gpu in gpus})
    errors = _reported_values({gpu.name: gpu.uncorrected for gpu in gpus})
    xids = _reported_values({gpu.name: len(gpu.xids) for gpu in gpus})
    for name, help_text, labels, values in (
        ("kelvin_gpu_health", "1 for the state that a GPU is in.", ("gpu", "state"), health),
        ("kelvin_gpu_memory_bytes", "A GPU's memory.", ("gpu", "state"), memory),
        ("kelvin_gpu_temperature_celsius", "How warm a GPU is.", ("gpu",), temperatures),
        ("kelvin_gpu_uncorrected_errors", "ECC errors since its driver was loaded.", ("gpu",), errors),
        ("kelvin_gpu_xids", "Different XIDs since this process opened the GPU.", ("gpu",), xids),
    ):
        page.callback(name, help_text, MetricKind.GAUGE, labels, partial(dict, values))


def _reported_values(values: Mapping[str, int | None]) -> Values:
    return series_by_label((gpu, float(value)) for gpu, value in values.items() if value is not None)
