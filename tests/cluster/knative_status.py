"""The status that Knative's controllers write, from what they see: as in lifecycle and conditions.json. Pure."""

from dataclasses import dataclass
from typing import Final

from tests.cluster.answers import Json

Condition = tuple[str, str, str, str]  # type, status, reason, message
TRUE: Final = ("True", "", "")
UNKNOWN: Final = ("Unknown", "", "")
OUT_OF_DATE: Final = (
    "Unknown", "OutOfDate", "The Configuration is still working to reflect the latest desired specification.",
)  # fmt: skip
INFO: Final = ("Active", "ActivatorEndpointsPopulated")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a Revision never becomes ready."""

    reason: str
    message: str


def state(obj: Json | None, name: str = "Ready") -> tuple[str, str, str]:
    """Status, reason and message of a condition; unknown where it isn't there."""
    for each in ((obj or {}).get("status") or {}).get("conditions") or []:
        if each["type"] == name:
            return each["status"], each.get("reason", ""), each.get("message", "")
    return UNKNOWN


def written(before: Json, found: dict[str, tuple[str, str, str]], now: str, **more: object) -> Json:
    """A whole status. A condition keeps its time while its status stays."""
    had = {each["type"]: each for each in ((before.get("status") or {}).get("conditions") or [])}
    conditions = []
    for name in sorted(found):
        status, reason, message = found[name]
        same = name in had and had[name]["status"] == status
        each = {"type": name, "status": status, "lastTransitionTime": had[name]["lastTransitionTime"] if same else now}
        each |= {key: value for key, value in (("reason", reason), ("message", message)) if value}
        kind = before["kind"]
        if (kind, name) in (("Revision", "Active"), ("ServerlessService", "ActivatorEndpointsPopulated")):
            each["severity"] = "Info"
        conditions.append(each)
    told = {key: value for key, value in more.items() if value is not None}
    return {"conditions": conditions, "observedGeneration": before["metadata"]["generation"], **told}


def of_revision(revision: Json, autoscaler: Json | None, pods: int, failure: Failure | None, now: str) -> Json:
    deploying = ("Unknown", "Deploying", "")
    desired = ((autoscaler or {}).get("status") or {}).get("desiredScale", -1)
    more = {"desiredReplicas": desired if desired >= 0 else None, "containerStatuses": None}
    if not revision.get("status"):
        resolving = ("Unknown", "ResolvingDigests", "")
        found = {"ContainerHealthy": UNKNOWN, "Ready": resolving, "ResourcesAvailable": resolving}
        return written(revision, found, now)
    if autoscaler is None or not autoscaler.get("status"):
        names = ("Active", "ContainerHealthy", "Ready", "ResourcesAvailable")
        return written(revision, dict.fromkeys(names, deploying), now)
    active = state(autoscaler, "Active")
    if active[0] == "True" and state(autoscaler)[0] != "True":
        active = ("Unknown", "NotReady", "")
    initialized = state(autoscaler, "ScaleTargetInitialized")[0] == "True"
    healthy = (pods > 0 and initialized) or state(revision)[0] == "True"  # what was ready stays it at zero
    if failure is not None and not healthy:
        bad = ("False", failure.reason, failure.message)
        found = {"Active": active, "ContainerHealthy": TRUE, "Ready": bad, "ResourcesAvailable": bad}
    elif healthy:
        found = {"Active": active, "ContainerHealthy": TRUE, "Ready": TRUE, "ResourcesAvailable": TRUE}
    else:
        found = {"Active": active, "ContainerHealthy": deploying, "Ready": deploying, "ResourcesAvailable": deploying}
    return written(revision, found, now, actualReplicas=pods, **more)


def of_configuration(configuration: Json, revision: Json | None, now: str) -> Json:
    had = configuration.get("status") or {}
    status, _, message = state(revision)
    name = None if revision is None else revision["metadata"]["name"]
    ready: tuple[str, str, str] = UNKNOWN
    if status == "True":
        ready = TRUE
    elif status == "False":
        ready = ("False", "RevisionFailed", f'Revision "{name}" failed with message: {message}.')
    served = name if status == "True" else had.get("latestReadyRevisionName")
    more = {"latestCreatedRevisionName": name, "latestReadyRevisionName": served}
    return written(configuration, {"Ready": ready}, now, **more)


def of_route(route: Json, configuration: Json | None, now: str, domain: str) -> Json:
    """Traffic goes to the last Revision that was ready; the ingress takes a step of its own."""
    metadata, had = route["metadata"], route.get("status") or {}
    served = ((configuration or {}).get("status") or {}).get("latestReadyRevisionName")
    waiting = ("Unknown", "IngressNotConfigured", "Ingress has not yet been reconciled.")
    if served is None:
        status = "False" if state(configuration)[0] == "False" else "Unknown"
        why = "" if configuration is None else f'Configuration "{configuration["metadata"]["name"]}"'
        text = (
            "does not have any ready Revision." if status == "False" else "is waiting for a Revision to become ready."
        )
        missing = (status, "RevisionMissing", f"{why} {text}")
        names = {"AllTrafficAssigned": missing, "CertificateProvisioned": UNKNOWN, "IngressReady": waiting}
        return written(route, names | {"Ready": missing}, now)
    certificate = ("True", "TLSNotEnabled", "external-domain-tls is not enabled")
    traffic = [{"latestRevision": True, "percent": 100, "revisionName": served}]
    settled = had.get("traffic") == traffic
    ingress = TRUE if settled else waiting
    found = {
        "AllTrafficAssigned": TRUE,
        "CertificateProvisioned": certificate,
        "IngressReady": ingress,
        "Ready": ingress,
    }
    host = f"{metadata['name']}.{metadata['namespace']}"
    address = {"url": f"http://{host}.svc.cluster.local"}
    return written(route, found, now, traffic=traffic, address=address, url=f"http://{host}.{domain}")


def of_service(service: Json, configuration: Json | None, route: Json | None, now: str) -> Json:
    made = (configuration or {}).get("status") or {}
    current = configuration is not None and configuration["spec"]["template"] == service["spec"]["template"]
    told = configuration is not None and made.get("observedGeneration") == configuration["metadata"]["generation"]
    ready = state(configuration) if current and told else OUT_OF_DATE
    had = service.get("status") or {}
    routed = state(route) if (route or {}).get("status") else OUT_OF_DATE
    target = (((route or {}).get("status") or {}).get("traffic") or [{}])[0].get("revisionName")
    if routed[0] == "True" and ready[0] == "True" and target != made.get("latestReadyRevisionName"):
        routed = ("Unknown", "TrafficNotMigrated", "Traffic is not yet migrated to the latest revision.")
    bad = [each for each in (routed, ready) if each[0] == "False"]
    unknown = [each for each in (routed, ready) if each[0] == "Unknown"]
    whole = bad[0] if bad else unknown[0] if unknown else TRUE
    status = (route or {}).get("status") or {}
    more = {name: status.get(name) for name in ("traffic", "address", "url")}
    for name in ("latestCreatedRevisionName", "latestReadyRevisionName"):
        more[name] = made.get(name) if current and told else had.get(name)
    found = {"ConfigurationsReady": ready, "RoutesReady": routed, "Ready": whole}
    return written(service, found, now, **more)


def of_autoscaler(autoscaler: Json, private: Json | None, sks: Json | None, scale: int, ready: int, now: str) -> Json:
    """`scale`: how many are wanted, -1 before anything was decided; `ready`: how many pods are."""
    name = autoscaler["metadata"]["name"]
    initialized = state(autoscaler, "ScaleTargetInitialized")[0] == "True" or ready > 0
    queued = ("Unknown", "Queued", "Requests to the target are being buffered as resources are provisioned.")
    idle = ("False", "NoTraffic", "The target is not receiving traffic.")
    active = idle if scale == 0 else TRUE if ready else queued
    backed = TRUE if state(sks)[0] == "True" else ("Unknown", "NotReady", "K8s Service is not ready")
    whole = active if active[0] != "True" else backed
    found = {
        "Active": active,
        "Ready": whole,
        "SKSReady": TRUE if state(autoscaler, "SKSReady")[0] == "True" and scale == 0 else backed,
        "ScaleTargetInitialized": TRUE if initialized else UNKNOWN,
    }
    names = {"serviceName": name if private else "", "metricsServiceName": f"{name}-private" if private else ""}
    return written(autoscaler, found, now, desiredScale=scale, actualScale=ready, **names)


def of_serverless_service(sks: Json, ready: int, now: str) -> Json:
    name = sks["metadata"]["name"]
    backed = TRUE if ready else ("Unknown", "NoHealthyBackends", "K8s Service is not ready")
    activator = ("True", "ActivatorEndpointsPopulated", "Revision is backed by Activator")
    found = {"ActivatorEndpointsPopulated": activator, "EndpointsPopulated": backed, "Ready": backed}
    return written(sks, found, now, serviceName=name, privateServiceName=f"{name}-private")
