"""A replica's own figures, read when it is asked. They are gauges, as they end with it; other processes count."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from contracts.gpu import Degraded, GpuFacts, Healthy, Unhealthy, judge
from runtime.replica import Replica
from telemetry.policy.instruments import Kind, Page, by
from telemetry.telemetry import local

Values = dict[tuple[str, ...], float]

_HEALTH: Final = {Healthy: "healthy", Degraded: "degraded", Unhealthy: "unhealthy"}


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
