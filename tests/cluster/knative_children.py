"""The objects that Knative's controllers make for a Service, as recorded in lifecycle/*.jsonl. Pure."""

from typing import Any, Final

from tests.cluster.answers import Json

SERVING: Final = "serving.knative.dev"
V1: Final = f"{SERVING}/v1"
AUTOSCALING: Final = "autoscaling.internal.knative.dev/v1alpha1"
NETWORKING: Final = "networking.internal.knative.dev"
TYPE: Final = f"{NETWORKING}/serviceType"
QUEUE_PORTS: Final = {"http-usermetric": 9091, "http-autometric": 9090, "https": 8112, "http": 8012, "http-istio": 8012}
CREATOR: Final = f"{SERVING}/creator"


def named(api_version: str, kind: str, name: str, owner: Json, labels: Json, annotations: Json, **more: Any) -> Json:
    """An object beside its owner, which controls it."""
    metadata = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [controlled_by(owner)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **more}


def controlled_by(owner: Json) -> Json:
    about = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    return about | {"uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}


def configuration(service: Json) -> Json:
    metadata = service["metadata"]
    ours = {f"{SERVING}/service": metadata["name"], f"{SERVING}/serviceUID": metadata["uid"]}
    labels = (metadata.get("labels") or {}) | ours
    spec = {"template": service["spec"]["template"]}
    return named(V1, "Configuration", metadata["name"], service, labels, {}, spec=spec)


def route(service: Json) -> Json:
    metadata = service["metadata"]
    labels = (metadata.get("labels") or {}) | {f"{SERVING}/service": metadata["name"]}
    traffic = [
        {key: value for key, value in each.items() if key != "configurationName"}
        | ({"configurationName": metadata["name"]} if each.get("latestRevision") else {})
        for each in service["spec"]["traffic"]
    ]
    found = named(V1, "Route", metadata["name"], service, labels, {}, spec={"traffic": traffic})
    found["metadata"]["finalizers"] = ["routes.serving.knative.dev"]
    return found


def revision(of: Json) -> Json:
    """The Revision of a Configuration's present generation."""
    metadata, template = of["metadata"], of["spec"]["template"]
    about = template.get("metadata") or {}
    labels = (about.get("labels") or {}) | {
        f"{SERVING}/configuration": metadata["name"],
        f"{SERVING}/configurationGeneration": str(metadata["generation"]),
        f"{SERVING}/configurationUID": metadata["uid"],
        f"{SERVING}/routingState": "active",
        f"{SERVING}/service": metadata["labels"][f"{SERVING}/service"],
        f"{SERVING}/serviceUID": metadata["labels"][f"{SERVING}/serviceUID"],
    }
    annotations = (about.get("annotations") or {}) | {CREATOR: metadata["annotations"][CREATOR]}
    name = about.get("name") or f"{metadata['name']}-{metadata['generation']:05d}"
    return named(V1, "Revision", name, of, labels, annotations, spec=template["spec"])


def _below(of: Json) -> tuple[Json, Json]:
    """The labels and annotations of all that lies under a Revision."""
    metadata = of["metadata"]
    labels = {key: value for key, value in metadata["labels"].items() if key != f"{SERVING}/routingState"}
    labels |= {
        "app": metadata["name"],
        f"{SERVING}/revision": metadata["name"],
        f"{SERVING}/revisionUID": metadata["uid"],
    }
    annotations = {key: value for key, value in metadata["annotations"].items() if key.partition("/")[0] != SERVING}
    return labels, annotations | {CREATOR: metadata["annotations"][CREATOR]}


def deployment(of: Json, replicas: int) -> Json:
    labels, annotations = _below(of)
    selector = {"matchLabels": {f"{SERVING}/revisionUID": of["metadata"]["uid"]}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": of["spec"]["containers"]}}
    spec = {"replicas": replicas, "selector": selector, "template": template}
    return named("apps/v1", "Deployment", f"{of['metadata']['name']}-deployment", of, labels, annotations, spec=spec)


def autoscaler(of: Json) -> Json:
    labels, annotations = _below(of)
    spec = {"protocolType": "http1", "reachability": "Reachable", "scaleTargetRef": _target(of["metadata"]["name"])}
    if of["spec"].get("containerConcurrency"):
        spec["containerConcurrency"] = of["spec"]["containerConcurrency"]
    return named(AUTOSCALING, "PodAutoscaler", of["metadata"]["name"], of, labels, annotations, spec=spec)


def _target(name: str) -> Json:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-deployment"}


def _as_its_owner(owner: Json) -> tuple[Json, Json]:
    return dict(owner["metadata"]["labels"]), dict(owner["metadata"].get("annotations") or {})


def serverless_service(of: Json) -> Json:
    labels, annotations = _as_its_owner(of)
    name = of["metadata"]["name"]
    spec = {"mode": "Proxy", "numActivators": 2, "objectRef": _target(name), "protocolType": "http1"}
    return named(f"{NETWORKING}/v1alpha1", "ServerlessService", name, of, labels, annotations, spec=spec)


def private_service(of: Json) -> Json:
    labels, annotations = _as_its_owner(of)
    name = of["metadata"]["name"]
    labels |= {f"{NETWORKING}/serverlessservice": name, TYPE: "Private"}
    ports = [
        {"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8012},
        {"name": "https", "protocol": "TCP", "port": 443, "targetPort": 8112},
        {"name": "http-autometric", "protocol": "TCP", "port": 9090, "targetPort": "http-autometric"},
        {"name": "http-usermetric", "protocol": "TCP", "port": 9091, "targetPort": "http-usermetric"},
        {"name": "http-istio", "protocol": "TCP", "port": 8012, "targetPort": 8012},
    ]
    spec = {"ports": ports, "selector": {f"{SERVING}/revisionUID": labels[f"{SERVING}/revisionUID"]}}
    return named("v1", "Service", f"{name}-private", of, labels, annotations, spec=spec)


def endpoint_slice(of: Json, pods: list[Json], ports: Json = QUEUE_PORTS) -> Json:
    """Of a private Service: its pods with an address. Without any, `endpoints` and `ports` are null."""
    name = of["metadata"]["name"]
    labels = of["metadata"]["labels"] | {
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
        "kubernetes.io/service-name": name,
    }
    found = named("discovery.k8s.io/v1", "EndpointSlice", f"{name}-s5pxm", of, labels, {})
    found |= {"addressType": "IPv4", "endpoints": [endpoint(each) for each in pods] or None}
    listed = [{"name": port, "protocol": "TCP", "port": number} for port, number in ports.items()]
    return found | {"ports": listed if pods else None}


def endpoint(pod: Json) -> Json:
    metadata = pod["metadata"]
    ready, ending = is_ready(pod), bool(metadata.get("deletionTimestamp"))
    about = {"kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": ready and not ending, "serving": ready, "terminating": ending},
        "targetRef": about,
        "nodeName": pod["spec"].get("nodeName"),
    }


def is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def pod(of: Json, name: str) -> Json:
    """Of a Deployment."""
    labels = dict(of["metadata"]["labels"])
    containers = [*of["spec"]["template"]["spec"]["containers"], {"name": "queue-proxy", "image": "queue:latest"}]
    spec = {"containers": containers, "nodeName": "node-1"}
    return named("v1", "Pod", name, of, labels, {}, spec=spec, status={"phase": "Pending"})


def running(pod: Json, address: str, *, ready: bool) -> Json:
    """The status of a pod whose containers run."""
    states = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    conditions = [{"type": name, "status": str(state)} for name, state in states.items()]
    started = [
        {"name": each["name"], "image": each["image"], "imageID": each["image"], "ready": ready, "restartCount": 0}
        | {"started": True, "state": {"running": {}}}
        for each in pod["spec"]["containers"]
    ]
    found = {"phase": "Running", "conditions": conditions, "podIP": address, "podIPs": [{"ip": address}]}
    return found | {"containerStatuses": started}
