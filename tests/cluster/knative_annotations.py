"""What Knative refuses in annotations: the autoscaler's, the deadline, the rollout, the sidecar's resources.

From webhook_validation (`annotation_*`, `progress_deadline*`, `rollout_*`, `queue_sidecar_*`); the rules are
pkg/apis/autoscaling/annotation_validation.go and pkg/apis/serving/metadata_validation.go at 98e5ef9.
"""

from collections.abc import Iterator
from typing import Any, Final

from tests.cluster.knative_defaults import AUTOSCALING, SERVING
from tests.cluster.quantities import amount, seconds

Fault = tuple[str, str, str]  # message, path, details

INT32: Final = 2**31 - 1
KPA: Final = f"kpa.{AUTOSCALING}"
HPA: Final = f"hpa.{AUTOSCALING}"
SHARES: Final = {
    "target-utilization-percentage": (1, 100),
    "panic-window-percentage": (1, 100),
    "panic-threshold-percentage": (110, 1000),
}
LENGTHS: Final = {
    "window": ("6s", 6),
    "scale-down-delay": ("0s", 0),
    "scale-to-zero-pod-retention-period": ("0s", 0),
}
SIDECAR: Final = tuple(
    f"queue.sidecar.{SERVING}/{what}-resource-{which}"
    for what in ("cpu", "memory", "ephemeral-storage")
    for which in ("request", "limit")
)


def of_service(annotations: dict[str, str], path: str) -> Iterator[Fault]:
    """On the Service itself nothing of the autoscaler's has a meaning."""
    for name in annotations:
        if name.startswith(f"{AUTOSCALING}/"):
            why = 'autoscaling annotations must be put under "spec.template.metadata.annotations" to work'
            yield f'invalid key name "{name}"', path, why
    yield from _length(annotations, "rollout-duration", path)


def of_template(annotations: dict[str, str], path: str) -> Iterator[Fault]:
    yield from of_autoscaler(annotations, path)
    yield from _length(annotations, "progress-deadline", path)
    for name in SIDECAR:
        if name in annotations and amount(annotations[name]) is None:
            yield f"invalid value: {annotations[name]}", f"{path}.[{name}]", ""


def _length(annotations: dict[str, str], name: str, path: str) -> Iterator[Fault]:
    value = annotations.get(f"{SERVING}/{name}")
    if value is None:
        return
    at, length = f"{path}.{SERVING}/{name}", seconds(value)
    if length is None:
        yield f"invalid value: {value}", at, ""
    elif length % 1:
        yield f"{name}={value} is not at second precision", at, ""
    elif length < 0:
        yield f"{name}={value} must be positive", at, ""


def of_autoscaler(annotations: dict[str, str], path: str) -> Iterator[Fault]:
    found = {name.removeprefix(f"{AUTOSCALING}/"): value for name, value in annotations.items() if AUTOSCALING in name}
    path = f"{path}.{AUTOSCALING}/"
    yield from _class(found, path)
    yield from _scales(found, path)
    yield from _numbers(found, path)
    for name, (shown, least) in LENGTHS.items():
        if name in found:
            value = found[name]
            length = seconds(value)
            if length is None:
                yield f"invalid value: {value}", path + name, ""
            elif length % 1:
                yield "must be specified with at most second precision", path + name, ""
            elif not least <= length <= 3600:
                yield f"expected {shown} <= {value} <= 1h0m0s", path + name, ""


def _class(found: dict[str, str], path: str) -> Iterator[Fault]:
    name = found.get("class", "") or KPA
    if name.endswith("knative.dev") and name not in (KPA, HPA):
        yield f"invalid value: {name}", f"{path}class", ""
    metric = found.get("metric")
    if metric is not None and name == KPA and metric not in ("concurrency", "rps"):
        yield f"invalid value: {metric}", f"{path}metric", ""
    algorithm = found.get("metric-aggregation-algorithm", "")
    if found.get("class") == KPA and algorithm not in ("", "linear", "weighted-exponential", "weightedExponential"):
        yield f"invalid value: {algorithm}", f"{path}metric-aggregation-algorithm", ""


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _scales(found: dict[str, str], path: str) -> Iterator[Fault]:
    sizes: dict[str, Any] = {}
    for name in ("min-scale", "max-scale"):
        if name not in found:
            continue
        value = _whole(found[name])
        if value is None:
            yield f"invalid value: {found[name]}", path + name, ""
        elif not 0 <= value <= INT32:
            yield f"expected 0 <= {found[name]} <= {INT32}", path + name, ""
        else:
            sizes[name] = value
    most, least = sizes.get("max-scale", 0), sizes.get("min-scale", 0)
    if 0 < most < least:
        for name in ("max-scale", "min-scale"):
            yield f"max-scale={most} is less than min-scale={least}", path + name, ""
    if "initial-scale" in found:
        value, name = _whole(found["initial-scale"]), f"{path}initial-scale"
        if value is None:
            yield f"invalid value: {found['initial-scale']}", name, ""
        elif value < 0:
            yield f"invalid value: {value}", f"{name} must be greater than 0", ""
        elif value == 0:
            yield "invalid value: 0", f"{name}=0 not allowed by cluster", ""
    if "activation-scale" in found:
        value, name = _whole(found["activation-scale"]), f"{path}activation-scale"
        if value is None:
            yield f"invalid value: {found['activation-scale']}", name, ""
        elif value < 2:
            yield f"activation-scale={value} must be greater than 1", name, ""
        elif 0 < most < value:
            yield f"max-scale={most} is less than activation-scale={value}", name, ""


def _numbers(found: dict[str, str], path: str) -> Iterator[Fault]:
    for name, value in found.items():
        if name not in ("target", "target-burst-capacity", *SHARES):
            continue
        try:
            number = float(value)
        except ValueError:
            yield f"invalid value: {value}", path + name, ""
            continue
        least, most = SHARES.get(name, (0, 0))
        if name == "target" and number < 0.01:
            yield f"target {value} should be at least 0.01", path + name, ""
        elif name == "target-burst-capacity" and number < 0 and number != -1:
            yield f"invalid value: {value}", path + name, ""
        elif name in SHARES and not least <= number <= most:
            yield f"expected {least} <= {value} <= {most}", path + name, ""
