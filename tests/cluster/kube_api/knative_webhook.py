"""Knative's admission webhooks for Services, as far as Kelvin renders them: defaults and refusals.

Checked against recorded answers (data/webhook.jsonl); the code is knative/serving's 98e5ef9. A pod field that Kelvin
does not render is refused, whatever the flags say. Record the real answer before rendering one.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.quantities import amount, canonical, seconds
from tests.cluster.kube_api.status_answers import Json, denied

Fault = tuple[str, str, str]  # message, path, details

SERVING: Final = "serving.knative.dev"
AUTOSCALING: Final = "autoscaling.knative.dev"
CREATOR: Final = f"{SERVING}/creator"
MODIFIER: Final = f"{SERVING}/lastModifier"
TIMEOUT_S: Final = 300
INT32: Final = 2**31 - 1
POD: Final = frozenset({
    "containers", "volumes", "timeoutSeconds", "responseStartTimeoutSeconds", "containerConcurrency",
    "enableServiceLinks", "automountServiceAccountToken",
})  # fmt: skip
FLAGGED: Final = ("nodeSelector", "tolerations", "topologySpreadConstraints", "priorityClassName")
VOLUMES: Final = ("name", "emptyDir", "secret", "configMap", "hostPath")
CONTAINER: Final = frozenset({
    "name", "image", "command", "args", "ports", "env", "envFrom", "resources", "readinessProbe", "livenessProbe",
    "startupProbe", "securityContext", "volumeMounts",
})  # fmt: skip
SECURITY: Final = frozenset(
    {"runAsNonRoot", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities", "seccompProfile"}
)
RESERVED_PORTS: Final = (8008, 8012, 8013, 8022, 8112, 9090, 9091)
RESERVED_ENV: Final = ("PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION")
RESERVED_PATHS: Final = ("/", "/dev", "/dev/log", "/var", "/var/log")
READ_ONLY: Final = ("configMap", "secret", "projected")
HANDLERS: Final = ("exec", "httpGet", "tcpSocket", "grpc")
LENGTHS: Final = {"window": ("6s", 6), "scale-to-zero-pod-retention-period": ("0s", 0)}
ANNOTATIONS: Final = frozenset(
    {"class", "metric", "metric-aggregation-algorithm", "min-scale", "max-scale", "initial-scale", "target"}
    | {"target-burst-capacity", "target-utilization-percentage", *LENGTHS}
)
DNS_1035: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"
DNS_1035_RULE: Final = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    f"and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '{DNS_1035}')"
)
PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE: Final = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?{PART}(?:/{PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[a-f0-9]{{64}})?"
)


@dataclass(slots=True)
class KnativeWebhook:
    """`features` are the flags of config-features, by name."""

    features: dict[str, str] = field(default_factory=dict)

    def mutate(self, kind: Kind, old: Json | None, new: Json, user: str) -> Json:
        """Return the object with its defaults, creator and last modifier. Raises Refused (400)."""
        return _signed(old, _defaulted(new), user) if _is_service(kind) else new

    def validate(self, kind: Kind, new: Json) -> None:
        """Check a Service. Raises Refused (400)."""
        if _is_service(kind) and (faults := list(self._faults(new))):
            raise denied(f"validation.webhook.{SERVING}", f"validation failed: {_printed(faults)}")

    def _faults(self, new: Json) -> Iterator[Fault]:
        metadata, template = new["metadata"], new["spec"]["template"]
        yield from _label(metadata["name"])
        for name in metadata.get("annotations") or {}:
            if name.startswith(f"{AUTOSCALING}/"):
                why = 'autoscaling annotations must be put under "spec.template.metadata.annotations" to work'
                yield f'invalid key name "{name}"', "metadata.annotations", why
        notes = template.get("metadata", {}).get("annotations") or {}
        yield from self._scale(notes, f"spec.template.metadata.annotations.{AUTOSCALING}/")
        yield from _deadline(notes, f"spec.template.metadata.annotations.{SERVING}/progress-deadline")
        yield from self._pod(template.get("spec") or {}, "spec.template.spec")

    def _pod(self, spec: Json, path: str) -> Iterator[Fault]:
        yield from _within(spec, "timeoutSeconds", 600, path)
        yield from _within(spec, "containerConcurrency", 1000, path)
        for name in spec:
            settable = name in FLAGGED and self._flag(name.lower()) != "disabled"
            if name not in POD and not settable:
                yield _forbidden(f"{path}.{name}")
        if spec.get("automountServiceAccountToken"):
            yield _forbidden(f"{path}.automountServiceAccountToken")
        yield from self._volumes(spec, path)
        if not (containers := spec.get("containers")):
            yield _missing(f"{path}.containers")
            return
        if len(containers) > 1:
            yield _forbidden(f"{path}.containers[1]")
        yield from _container(containers[0], spec, f"{path}.containers[0]")

    def _flag(self, name: str) -> str:
        return self.features.get(f"kubernetes.podspec-{name}", "disabled").lower()

    def _volumes(self, spec: Json, path: str) -> Iterator[Fault]:
        mounted = {
            mount.get("name") for each in spec.get("containers") or [] for mount in each.get("volumeMounts") or []
        }
        for index, each in enumerate(spec.get("volumes") or []):
            at, name, flag = f"{path}.volumes[{index}]", each.get("name", ""), self._flag("volumes-hostpath")
            yield from (_forbidden(f"{at}.{source}") for source in each if source not in VOLUMES)
            if "hostPath" in each and flag != "enabled":
                yield f"HostPath volume support is disabled, but found HostPath volume {name}", "", ""
            if "hostPath" in each and flag == "disabled":
                yield _forbidden(f"{at}.hostPath")
            medium = (each.get("emptyDir") or {}).get("medium", "")
            if medium not in ("", "Memory"):
                yield f"invalid value: {medium}", f"{at}.emptyDir.medium", ""
            if name not in mounted:
                yield f'volume with name "{name}" not mounted', f"{at}.name", ""

    def _scale(self, annotations: dict[str, str], path: str) -> Iterator[Fault]:
        prefix = f"{AUTOSCALING}/"
        found = {name.removeprefix(prefix): value for name, value in annotations.items() if name.startswith(prefix)}
        for name, value in found.items():
            if name not in ANNOTATIONS:
                yield "not imitated", path + name, ""
            elif name in LENGTHS:
                yield from _length(value, *LENGTHS[name], path + name)
        if found.get("class") not in (None, f"kpa.{AUTOSCALING}"):
            yield f"invalid value: {found['class']}", f"{path}class", ""
        if found.get("metric") not in (None, "concurrency", "rps"):
            yield f"invalid value: {found['metric']}", f"{path}metric", ""
        yield from self._scales(found, path)
        share = found.get("target-utilization-percentage", "100")
        if not 1 <= float(share) <= 100:
            yield f"expected 1 <= {share} <= 100", f"{path}target-utilization-percentage", ""
        for name, least in (("target", 0.01), ("target-burst-capacity", -1)):
            value = found.get(name, "1")
            if (number := _number(value)) is None or (name != "target" and number < least):
                yield f"invalid value: {value}", path + name, ""
            elif number < least:
                yield f"target {value} should be at least 0.01", path + name, ""

    def _scales(self, found: dict[str, str], path: str) -> Iterator[Fault]:
        sizes: dict[str, float] = {}
        for name in ("min-scale", "max-scale", "initial-scale"):
            if (text := found.get(name)) is None:
                continue
            value = int(text) if re.fullmatch(r"-?\d+", text) else None
            if value is None or (name == "initial-scale" and value < 0):
                greater = name == "initial-scale" and value is not None
                yield f"invalid value: {text}", path + name + (" must be greater than 0" if greater else ""), ""
            elif name == "initial-scale":
                # A key of config-autoscaler.
                if value == 0 and self.features.get("allow-zero-initial-scale") != "true":
                    yield "invalid value: 0", f"{path}{name}=0 not allowed by cluster", ""
            elif not 0 <= value <= INT32:
                yield f"expected 0 <= {text} <= {INT32}", path + name, ""
            else:
                sizes[name] = value
        most, least = sizes.get("max-scale", 0), sizes.get("min-scale", 0)
        if 0 < most < least:
            for name in ("max-scale", "min-scale"):
                yield f"max-scale={most} is less than min-scale={least}", path + name, ""


def _is_service(kind: Kind) -> bool:
    return kind.stored == (SERVING, "services")


def _defaulted(new: Json) -> Json:
    new = copy.deepcopy(new)
    spec = new.setdefault("spec", {})
    template = spec["template"] = spec.get("template") or {}
    metadata = template.get("metadata") or {}
    template["metadata"] = {key: value for key, value in metadata.items() if value not in ({}, [], None, "")}
    _default_pod(template.setdefault("spec", {}))
    spec["traffic"] = spec.get("traffic") or [{"latestRevision": True, "percent": 100}]
    return new


def _default_pod(spec: Json) -> None:
    containers = spec.setdefault("containers", None) or []
    spec["timeoutSeconds"] = spec.get("timeoutSeconds") or TIMEOUT_S
    if spec["timeoutSeconds"] > TIMEOUT_S:
        spec.setdefault("responseStartTimeoutSeconds", TIMEOUT_S)
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("containerConcurrency", 0)
    volumes = {each.get("name"): each for each in spec.get("volumes") or []}
    for each in volumes.values():
        _canonical(each.get("emptyDir") or {}, "sizeLimit")
    for container in containers:
        container["name"] = container.get("name") or "user-container"
        resources = container.setdefault("resources", {})
        for listed in (resources.get("limits") or {}, resources.get("requests") or {}):
            for name in listed:
                _canonical(listed, name)
        _default_probes(container)
        for each in container.get("volumeMounts") or []:
            if any(name in volumes.get(each.get("name"), {}) for name in READ_ONLY):
                each["readOnly"] = True
            if not each.get("readOnly", True):
                del each["readOnly"]  # Go leaves out what is false


def _default_probes(container: Json) -> None:
    for name in ("livenessProbe", "startupProbe", "readinessProbe"):
        for handler in ("httpGet", "tcpSocket", "grpc"):
            if handler in (container.get(name) or {}):
                container[name][handler].setdefault("port", 0)
    probe = container.setdefault("readinessProbe", {})
    if not any(name in probe for name in HANDLERS):
        probe["tcpSocket"] = {"port": 0}
    probe.setdefault("successThreshold", 1)
    if probe.get("periodSeconds"):
        probe.setdefault("failureThreshold", 3)
        probe.setdefault("timeoutSeconds", 1)


def _canonical(amounts: Json, name: str) -> None:
    if name not in amounts:
        return
    if amount(amounts[name]) is None:
        why = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        raise denied(f"webhook.{SERVING}", f"mutation failed: cannot decode incoming new object: {why}")
    amounts[name] = canonical(amounts[name])


def _signed(old: Json | None, new: Json, user: str) -> Json:
    annotations = dict(new["metadata"].get("annotations") or {})
    if old is None:
        annotations |= {CREATOR: user, MODIFIER: user}
    elif old.get("spec") != new.get("spec"):
        annotations[MODIFIER] = user
    return new | {"metadata": new["metadata"] | {"annotations": annotations}}


def _container(container: Json, spec: Json, at: str) -> Iterator[Fault]:
    yield from (_forbidden(f"{at}.{name}") for name in container if name not in CONTAINER)
    if container["name"] == "queue-proxy":
        yield '"queue-proxy" is a reserved container name', f"{at}.name", ""
    image = container.get("image") or ""
    if not image:
        yield _missing(f"{at}.image")
    elif not IMAGE.fullmatch(image):
        why = f'image: "{image}", error: could not parse reference: {image}'
        yield "Failed to parse image reference", f"{at}.image", why
    yield from _ports(container.get("ports") or [], at)
    for index, each in enumerate(container.get("env") or []):
        yield from _env(each, f"{at}.env[{index}]")
    security = container.get("securityContext") or {}
    yield from (_forbidden(f"{at}.securityContext.{name}") for name in security if name not in SECURITY)
    if (security.get("capabilities") or {}).get("add"):
        yield _forbidden(f"{at}.securityContext.capabilities.add")
    known = {each.get("name") for each in spec.get("volumes") or []}
    for index, each in enumerate(container.get("volumeMounts") or []):
        yield from _mount(each, known, f"{at}.volumeMounts[{index}]")


def _ports(ports: list[Json], at: str) -> Iterator[Fault]:
    if len(ports) > 1:
        why = "Only a single port is allowed across all containers"
        yield "more than one container port is set", f"{at.replace('[0]', '[*]')}.ports", why
    for each in ports[:1]:
        number, name, protocol = each.get("containerPort", 0), each.get("name", ""), each.get("protocol", "TCP")
        if number in RESERVED_PORTS:
            why = f"{number} is a reserved port, please use a different value"
            yield f"invalid value: {number} is a reserved port", f"{at}.ports.containerPort", why
        yield from _within(each, "containerPort", 65535, f"{at}.ports")
        if protocol != "TCP":
            yield f"invalid value: {protocol}", f"{at}.ports.protocol", ""
        if name not in ("", "h2c", "http1"):
            yield f"Port name {name} is not allowed", f"{at}.ports", "Name must be empty, or one of: 'h2c', 'http1'"


def _env(env: Json, at: str) -> Iterator[Fault]:
    name = env.get("name") or ""
    if not name:
        yield _missing(f"{at}.name")
    elif name in RESERVED_ENV:
        yield f'"{name}" is a reserved environment variable', f"{at}.name", ""
    yield from (_forbidden(f"{at}.valueFrom.{source}") for source in env.get("valueFrom") or {})


def _mount(mount: Json, known: set[Any], at: str) -> Iterator[Fault]:
    if mount.get("name") not in known:
        yield "volumeMount has no matching volume", f"{at}.name", ""
    path = mount.get("mountPath") or ""
    if not path:
        yield _missing(f"{at}.mountPath")
    elif (path.rstrip("/") or "/") in RESERVED_PATHS:
        yield f'mountPath "{path}" is a reserved path', f"{at}.mountPath", ""
    elif not path.startswith("/"):
        yield f"invalid value: {path}", f"{at}.mountPath", ""
    if "mountPropagation" in mount:
        yield _forbidden(f"{at}.mountPropagation")


def _deadline(annotations: dict[str, str], at: str) -> Iterator[Fault]:
    value = annotations.get(f"{SERVING}/progress-deadline", "1s")
    if (length := seconds(value)) is None:
        yield f"invalid value: {value}", at, ""
    elif length % 1:
        yield f"progress-deadline={value} is not at second precision", at, ""
    elif length < 0:
        yield f"progress-deadline={value} must be positive", at, ""


def _length(value: str, shown: str, least: float, at: str) -> Iterator[Fault]:
    if (length := seconds(value)) is None:
        yield f"invalid value: {value}", at, ""
    elif length % 1:
        yield "must be specified with at most second precision", at, ""
    elif not least <= length <= 3600:
        yield f"expected {shown} <= {value} <= 1h0m0s", at, ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _missing(path: str) -> Fault:
    return "missing field(s)", path, ""


def _forbidden(path: str) -> Fault:
    return "must not set the field(s)", path, ""


def _within(obj: Json, name: str, most: int, path: str) -> Iterator[Fault]:
    value = obj.get(name)
    if value is not None and not 0 <= value <= most:
        yield f"expected 0 <= {value} <= {most}", f"{path}.{name}", ""


def _label(name: str) -> Iterator[Fault]:
    wrong = ["must be no more than 63 characters"] if len(name) > 63 else []
    if not re.fullmatch(DNS_1035, name):
        wrong.append(DNS_1035_RULE)
    if wrong:
        yield f"not a DNS 1035 label: [{', '.join(wrong)}]", "metadata.name", ""


def _printed(faults: list[Fault]) -> str:
    """Return the text of FieldError.Error: one line per message, with its paths merged."""
    merged: dict[tuple[str, str], list[str]] = {}
    for message, path, details in faults:
        paths = merged.setdefault((message, details), [])
        if path not in paths:
            paths.append(path)
    lines = []
    for message, details in sorted(merged):
        text = f"{message}: {', '.join(sorted(merged[message, details]))}"
        lines.append(f"{text}\n{details}" if details else text)
    return "\n".join(lines)
