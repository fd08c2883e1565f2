"""What Knative's defaulting webhook writes into a Service, Configuration, Revision, Route or PodAutoscaler.

From webhook_defaults and the accepted rows of webhook_validation; the rules are serving/v1's *_defaults.go at 98e5ef9.
"""

import copy
from typing import Any, Final

from tests.cluster.answers import Json, denied
from tests.cluster.quantities import amount, canonical

WEBHOOK: Final = "webhook.serving.knative.dev"
SERVING: Final = "serving.knative.dev"
AUTOSCALING: Final = "autoscaling.knative.dev"
CREATOR: Final = f"{SERVING}/creator"
MODIFIER: Final = f"{SERVING}/lastModifier"
OWNED: Final = ("Service", "Configuration", "Route")  # they say who made and changed them
TIMEOUT_S: Final = 300
START_S: Final = 300
HANDLERS: Final = ("exec", "httpGet", "tcpSocket", "grpc")
READ_ONLY: Final = ("configMap", "secret", "projected")


def undecoded(why: str) -> Exception:
    return denied(WEBHOOK, f"mutation failed: cannot decode incoming new object: {why}")


def defaulted(kind: str, new: Json) -> Json:
    """The object with its defaults. Raises Refused where it cannot be decoded."""
    new = copy.deepcopy(new)
    spec = new.setdefault("spec", {})
    match kind:
        case "Service" | "Configuration":
            template = spec.setdefault("template", {}) or {}
            spec["template"] = template
            _metadata(template)
            _revision(template.setdefault("spec", {}))
            if kind == "Service":
                _traffic(spec)
        case "Revision":
            _revision(spec)
        case "Route":
            _traffic(spec)
        case "PodAutoscaler":
            spec.setdefault("protocolType", "")  # Go writes what is empty, and the schema is content
            spec.setdefault("scaleTargetRef", {})
            _autoscaler(new)
    return new


def _metadata(template: Json) -> None:
    metadata = template.setdefault("metadata", {}) or {}
    for where in ("annotations", "labels"):
        for name, value in (metadata.get(where) or {}).items():
            if not isinstance(value, str):
                got = {bool: "bool", dict: "object", list: "array"}.get(type(value), "number")
                path = f"spec.template.metadata.{where}.{name.replace('/', '~1')}"
                raise undecoded(f"json: cannot unmarshal {got} into Go struct field Service.{path} of type string")
    template["metadata"] = {key: value for key, value in metadata.items() if value not in ({}, [], None, "")}


def _revision(spec: Json) -> None:
    containers = spec.setdefault("containers", None) or []
    spec["timeoutSeconds"] = spec.get("timeoutSeconds") or TIMEOUT_S
    if spec["timeoutSeconds"] > START_S:
        spec.setdefault("responseStartTimeoutSeconds", START_S)
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("containerConcurrency", 0)
    for name in ("timeoutSeconds", "containerConcurrency", "idleTimeoutSeconds", "responseStartTimeoutSeconds"):
        if isinstance(spec.get(name), str):
            where = f"RevisionSpec.spec.template.spec.{name}"
            raise undecoded(f"json: cannot unmarshal string into Go struct field {where} of type int64")
    volumes = {each.get("name"): each for each in spec.get("volumes") or []}
    for each in volumes.values():
        if "sizeLimit" in (each.get("emptyDir") or {}):
            each["emptyDir"]["sizeLimit"] = _quantity(each["emptyDir"]["sizeLimit"])
    for index, each in enumerate(containers):
        if not each.get("name"):
            each["name"] = "user-container" if len(containers) == 1 else f"user-container-{index}"
        _container(each, volumes, serving=len(containers) == 1 or bool(each.get("ports")))
    for index, each in enumerate(spec.get("initContainers") or []):
        if not each.get("name"):
            each["name"] = f"init-container-{index}"
        _container(each, volumes, serving=False)


def _container(container: Json, volumes: dict[Any, Json], *, serving: bool) -> None:
    resources = container.setdefault("resources", {})
    for listed in (resources.get("limits"), resources.get("requests")):
        for name in listed or {}:
            listed[name] = _quantity(listed[name])
    for name in ("livenessProbe", "startupProbe", "readinessProbe"):
        if container.get(name) is not None:
            _handler(container[name])
    if serving:
        _readiness(container.setdefault("readinessProbe", {}))
    elif container.get("readinessProbe") is not None:
        container["readinessProbe"].setdefault("successThreshold", 1)
    for each in container.get("volumeMounts") or []:
        if any(name in volumes.get(each.get("name"), {}) for name in READ_ONLY):
            each["readOnly"] = True
        if not each.get("readOnly", True):
            del each["readOnly"]  # Go leaves out what is false


def _readiness(probe: Json) -> None:
    if not any(name in probe for name in HANDLERS):
        probe["tcpSocket"] = {"port": 0}
    probe.setdefault("successThreshold", 1)
    if probe.get("periodSeconds"):
        probe.setdefault("failureThreshold", 3)
        probe.setdefault("timeoutSeconds", 1)


def _handler(probe: Json) -> None:
    for name in ("httpGet", "tcpSocket", "grpc"):
        if name in probe:
            probe[name].setdefault("port", 0)


def _quantity(value: Any) -> str:
    if amount(value) is None:
        raise undecoded("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")
    return canonical(value)


def _traffic(spec: Json) -> None:
    spec["traffic"] = spec.get("traffic") or [{"latestRevision": True, "percent": 100}]
    for each in spec["traffic"]:
        each.setdefault("latestRevision", not each.get("revisionName"))


def _autoscaler(new: Json) -> None:
    annotations = new["metadata"].setdefault("annotations", {})
    kind = annotations.setdefault(f"{AUTOSCALING}/class", f"kpa.{AUTOSCALING}")
    metric = {f"kpa.{AUTOSCALING}": "concurrency", f"hpa.{AUTOSCALING}": "cpu"}.get(kind, "")
    annotations.setdefault(f"{AUTOSCALING}/metric", metric)


def signed(kind: str, old: Json | None, new: Json, user: str) -> Json:
    """Who made it, and who changed it last."""
    if kind not in OWNED:
        return new
    annotations = dict(new["metadata"].get("annotations") or {})
    if old is None:
        annotations |= {CREATOR: user, MODIFIER: user}
    elif old.get("spec") != new.get("spec"):
        annotations[MODIFIER] = user
    return new | {"metadata": new["metadata"] | {"annotations": annotations}}
