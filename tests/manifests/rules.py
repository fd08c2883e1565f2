"""Rules for the manifests beyond their schemas. Each rule yields what breaks it."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from controlplane.knative.policy.namespace_requirements import store_port
from controlplane.knative.policy.object_labels import ROLE, RUNTIME
from tests.manifests.controllers import evictable, least_available, updated
from tests.manifests.kustomize_build import containers, pod_of
from tests.manifests.network_reach import Pod, may

Json = dict[str, Any]
Rule = Callable[[list[Json]], Iterator[str]]

DIGEST: Final = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+@sha256:[0-9a-f]{64}")
SPEAKS_TO_THE_CLUSTER: Final = frozenset({"controlplane"})
# Labels that the product writes to its pods. No pod template has them, but Services select by them.
WRITTEN_LABELS: Final = frozenset({ROLE})
BROUGHT: Final = frozenset({"kelvin-trust"})  # config maps that an operator creates, like secrets
OWNED: Final = (("modelversions", "models"),)  # created kind and its owner
_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
_OWN_RIGHTS: Final = frozenset({"secrets", "roles", "clusterroles", "rolebindings", "clusterrolebindings"})
_SECRET: Final = frozenset({"secrets", "configmaps"})
_READS: Final = frozenset({"get", "list", "watch"})
_RAISING: Final = frozenset({"escalate", "bind", "impersonate"})


def _name(obj: Json) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"


def limits(objects: list[Json]) -> Iterator[str]:
    """Every container has requests and limits, so one that uses too much is ended and not its neighbour."""
    for each in containers(objects):
        for which in ("requests", "limits"):
            given = each.get("resources", {}).get(which, {})
            yield from (f"{each['name']}: no {which} of {one}" for one in _RESOURCES if one not in given)


def probes(objects: list[Json]) -> Iterator[str]:
    """Every container has its probes, except in jobs, which end by themselves."""
    for obj in objects:
        pod = pod_of(obj)
        for each in pod["containers"] if pod is not None and obj["kind"] not in ("Job", "CronJob") else ():
            asked = ("startupProbe", "readinessProbe", "livenessProbe")
            yield from (f"{each['name']}: no {one}" for one in asked if one not in each)


def containment(objects: list[Json]) -> Iterator[str]:
    """Containers run without root, extra rights, writable image files or access to the node."""
    wanted = {
        "allowPrivilegeEscalation": False, "privileged": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    for each in containers(objects):
        given = each.get("securityContext", {})
        yield from (f"{each['name']}: {name} is not {want}" for name, want in wanted.items() if given.get(name) != want)
        yield from (f"{each['name']}: a port of the node" for port in each.get("ports", ()) if "hostPort" in port)
    for pod in filter(None, map(pod_of, objects)):
        given = pod.get("securityContext", {})
        if given.get("runAsNonRoot") is not True or not given.get("runAsUser") or not given.get("fsGroup"):
            yield "a pod of root"
        yield from (f"{name} of the node" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
        yield from (f"{each['name']}: a directory of the node" for each in pod.get("volumes", ()) if "hostPath" in each)
        yield from (
            f"{each['name']}: without a bound"
            for each in pod.get("volumes", ())
            if "emptyDir" in each and "sizeLimit" not in each["emptyDir"]
        )


def images(objects: list[Json]) -> Iterator[str]:
    """Images are named by digest, so the tested one runs."""
    yield from (
        f"{each['name']}: {each['image']}" for each in containers(objects) if not DIGEST.fullmatch(each["image"])
    )


def rights(objects: list[Json]) -> Iterator[str]:
    """No wildcards, no general access to secrets, no way to more rights. A binding's role and account exist."""
    there = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects}
    for obj in objects:
        for rule in obj.get("rules", ()) if obj["kind"] in ("Role", "ClusterRole") else ():
            said = [
                *rule.get("apiGroups", ()),
                *rule.get("resources", ()),
                *rule["verbs"],
                *rule.get("nonResourceURLs", ()),
            ]
            if any("*" in each for each in said):
                yield f"{_name(obj)}: a wildcard"
            is_named = bool(rule.get("resourceNames")) and rule["verbs"] == ["get"]
            own = set(rule.get("resources", ())) - ({"secrets"} if is_named else set())
            if _OWN_RIGHTS & own or _RAISING & set(rule["verbs"]):
                yield f"{_name(obj)}: a way to more rights"
        if obj["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            role, home = obj["roleRef"], obj["metadata"].get("namespace")
            if (role["kind"], home if role["kind"] == "Role" else None, role["name"]) not in there:
                yield f"{_name(obj)}: no such role"
            for each in obj["subjects"]:
                if (each["kind"], each["namespace"], each["name"]) not in there or each["name"] == "default":
                    yield f"{_name(obj)}: no service account of ours"


def bounds(objects: list[Json]) -> Iterator[str]:
    """Cluster-wide rights only read, except for our own kinds and events."""
    everywhere = {each["roleRef"]["name"] for each in objects if each["kind"] == "ClusterRoleBinding"}
    for obj in (each for each in objects if each["kind"] == "ClusterRole" and each["metadata"]["name"] in everywhere):
        for rule in obj["rules"]:
            written = set(rule["verbs"]) - _READS
            if written and rule["apiGroups"] != ["kelvin.dev"] and rule["resources"] != ["events"]:
                yield f"{_name(obj)}: writes {', '.join(rule['resources'])} everywhere"
            if _SECRET & set(rule["resources"]):
                yield f"{_name(obj)}: reads {', '.join(rule['resources'])} everywhere"


def owners(objects: list[Json]) -> Iterator[str]:
    """A role that creates dependents may update their owner's finalizers, as OwnerReferencesPermissionEnforcement
    requires.
    """
    for obj in (each for each in objects if each["kind"] in ("Role", "ClusterRole")):
        may = {(what, verb) for rule in obj["rules"] for what in rule.get("resources", ()) for verb in rule["verbs"]}
        for made, owner in OWNED:
            if (made, "create") in may and (f"{owner}/finalizers", "update") not in may:
                yield f"{_name(obj)}: makes {made} that are not to be of {owner}"


def accounts(objects: list[Json]) -> Iterator[str]:
    """Each pod has its own account, and a token only if it calls the API server."""
    there = {
        (each["metadata"]["namespace"], each["metadata"]["name"])
        for each in objects
        if each["kind"] == "ServiceAccount"
    }
    for obj in objects:
        if obj["kind"] == "ServiceAccount" and obj.get("automountServiceAccountToken") is not False:
            yield f"{_name(obj)}: a token for everybody"
        if (pod := pod_of(obj)) is not None:
            name = pod.get("serviceAccountName", "default")
            if (obj["metadata"]["namespace"], name) not in there:
                yield f"{_name(obj)}: no account {name}"
            if pod.get("automountServiceAccountToken") is not (name in SPEAKS_TO_THE_CLUSTER):
                yield f"{_name(obj)}: its token"
            if pod.get("enableServiceLinks") is not False:
                yield f"{_name(obj)}: names of services in its environment"


def secrets(objects: list[Json]) -> Iterator[str]:
    """Secrets are only referenced, and not readable by every user of the container."""
    for obj in objects:
        if obj["kind"] == "Secret":
            yield f"{_name(obj)}: lies in a repository"
        for volume in (pod_of(obj) or {}).get("volumes", ()):
            if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
                yield f"{_name(obj)}: {volume['name']} is readable by all"
    for each in containers(objects):
        for variable in each.get("env", ()):
            if re.search(r"(PASSWORD|SECRET|TOKEN|KEY|REDIS)$", variable["name"]) and "value" in variable:
                yield f"{each['name']}: {variable['name']} is written out"


def availability(objects: list[Json]) -> Iterator[str]:
    """Deployments with several pods survive the drain of a node and are spread over nodes."""
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in objects if each["kind"] == "HorizontalPodAutoscaler"}
    budgets = [each["spec"]["selector"]["matchLabels"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    for obj in (each for each in objects if each["kind"] == "Deployment"):
        name, spec = obj["metadata"]["name"], obj["spec"]
        if name not in scaled and spec["replicas"] < 2:
            continue
        if name in scaled and "replicas" in spec:
            yield f"{name}: an apply undoes its autoscaler's work"
        if spec["selector"]["matchLabels"] not in budgets:
            yield f"{name}: no PodDisruptionBudget"
        pod = spec["template"]["spec"]
        if "podAntiAffinity" not in pod.get("affinity", {}) or "topologySpreadConstraints" not in pod:
            yield f"{name}: all on one node"


def updates(objects: list[Json]) -> Iterator[str]:
    """An update ends, and never stops all of several pods at once."""
    for obj in (each for each in objects if each["kind"] == "Deployment"):
        name, replicas, strategy = obj["metadata"]["name"], _replicas(obj, objects), obj["spec"].get("strategy", {})
        old, _ = updated(replicas, strategy)
        if old:
            yield f"{name}: {old} of {replicas} old pods are kept"
        if replicas > 1 and not least_available(replicas, strategy):
            yield f"{name}: an update may end all {replicas} at once"


def drains(objects: list[Json]) -> Iterator[str]:
    """A pod with a budget can be evicted, so a node can be drained, but never all of several pods at once."""
    for budget in (each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"):
        chosen = budget["selector"]["matchLabels"].items()
        for obj in (each for each in objects if each["kind"] in ("Deployment", "StatefulSet")):
            name, replicas = obj["metadata"]["name"], _replicas(obj, objects)
            labels = obj["spec"]["template"]["metadata"]["labels"].items()
            if not chosen <= labels:
                continue
            at_once = evictable(budget, replicas)
            if not at_once:
                yield f"{name}: none of {replicas} may be evicted"
            if at_once == replicas > 1:
                yield f"{name}: all {replicas} may be evicted at once"


def preemption(objects: list[Json]) -> Iterator[str]:
    """Only pods that take requests may preempt others, not replicas or caches."""
    for each in (each for each in objects if each["kind"] == "PriorityClass"):
        if each["metadata"]["name"] != "kelvin-platform" and each.get("preemptionPolicy") != "Never":
            yield f"{_name(each)}: preempts"
    for each in (each for each in objects if each["kind"] == "DaemonSet"):
        if not each["spec"]["template"]["spec"].get("nodeSelector"):
            yield f"{_name(each)}: takes room on every node"


def exposure(objects: list[Json]) -> Iterator[str]:
    """No Service leads to the health port, since metrics name tenants."""
    for each in (each for each in objects if each["kind"] == "Service"):
        if any(port["targetPort"] == "health" for port in each["spec"]["ports"]):
            yield f"{_name(each)}: leads to figures"


def kept(objects: list[Json]) -> Iterator[str]:
    """Objects that are not ours, or hold the only copy of data, survive an uninstall and a prune."""
    for each in objects:
        about, kind = each["metadata"], each["kind"]
        if kind == "CustomResourceDefinition" or about.get("namespace") == "knative-serving":
            yield f"{_name(each)}: goes with what is Kelvin's"
        notes = about.get("annotations", {})
        is_kept = notes.get("kustomize.toolkit.fluxcd.io/prune") == "disabled" and "Prune=false" in notes.get(
            "argocd.argoproj.io/sync-options", ""
        )
        if kind in ("Namespace", "PersistentVolumeClaim") and not is_kept:
            yield f"{_name(each)}: is pruned"


def _replicas(obj: Json, objects: list[Json]) -> int:
    """Return the replicas of a workload; with an autoscaler its minimum."""
    for each in objects:
        if each["kind"] == "HorizontalPodAutoscaler":
            target = each["spec"]["scaleTargetRef"]
            if (target["kind"], target["name"]) == (obj["kind"], obj["metadata"]["name"]):
                return int(each["spec"]["minReplicas"])
    return int(obj["spec"].get("replicas", 1))


def references(objects: list[Json]) -> Iterator[str]:
    """Everything that an object names exists: settings, classes, claims, ports, labels."""
    there = {(each["kind"], each["metadata"]["name"]) for each in objects}
    yield from _idle(objects)
    for obj in objects:
        pod = pod_of(obj)
        if pod is not None:
            labels = obj["spec"].get("template", {}).get("metadata", {}).get("labels", {})
            chosen = obj["spec"].get("selector", {}).get("matchLabels", {})
            if not chosen.items() <= labels.items():
                yield f"{_name(obj)}: chooses other pods"
            if ("PriorityClass", pod.get("priorityClassName")) not in there:
                yield f"{_name(obj)}: no such priority"
            yield from _mounts(obj, pod, there)
        if obj["kind"] == "Service":
            yield from _ports(obj, objects)
        if obj["kind"] == "HorizontalPodAutoscaler":
            target = obj["spec"]["scaleTargetRef"]
            if (target["kind"], target["name"]) not in there:
                yield f"{_name(obj)}: scales nothing"


def _idle(objects: list[Json]) -> Iterator[str]:
    """Yield the priority classes that no pod and no replica uses."""
    used = {pod.get("priorityClassName") for pod in filter(None, map(pod_of, objects))}
    used |= {each["data"].get("KELVIN_CLUSTER_PRIORITY_CLASS") for each in objects if each["kind"] == "ConfigMap"}
    there = (each for each in objects if each["kind"] == "PriorityClass")
    yield from (f"{_name(each)}: nobody has it" for each in there if each["metadata"]["name"] not in used)


def _mounts(obj: Json, pod: Json, there: set[tuple[str, str]]) -> Iterator[str]:
    volumes = {each["name"]: each for each in pod.get("volumes", ())}
    volumes |= {each["metadata"]["name"]: {} for each in obj["spec"].get("volumeClaimTemplates", ())}
    mounted = set()
    for each in (*pod.get("initContainers", ()), *pod["containers"]):
        mounted |= {mount["name"] for mount in each.get("volumeMounts", ())}
        for source in each.get("envFrom", ()):
            if "configMapRef" in source and ("ConfigMap", source["configMapRef"]["name"]) not in there:
                yield f"{_name(obj)}: no settings {source['configMapRef']['name']}"
        for variable in each.get("env", ()):
            wanted = variable.get("valueFrom", {}).get("configMapKeyRef", {}).get("name")
            if wanted and ("ConfigMap", wanted) not in there:
                yield f"{_name(obj)}: no settings {wanted}"
    yield from (f"{_name(obj)}: {name} is not both mounted and there" for name in mounted ^ volumes.keys())
    for each in volumes.values():
        claim = each.get("persistentVolumeClaim", {}).get("claimName")
        if claim and ("PersistentVolumeClaim", claim) not in there:
            yield f"{_name(obj)}: no claim {claim}"
        settings = each.get("configMap", {}).get("name")
        if settings and settings not in BROUGHT and ("ConfigMap", settings) not in there:
            yield f"{_name(obj)}: no settings {settings}"


def _ports(service: Json, objects: list[Json]) -> Iterator[str]:
    chosen = {key: value for key, value in service["spec"]["selector"].items() if key not in WRITTEN_LABELS}.items()
    found = [
        {port.get("name") for each in pod["containers"] for port in each.get("ports", ())}
        for obj in objects
        if (pod := pod_of(obj)) and chosen <= obj["spec"]["template"]["metadata"]["labels"].items()
    ]
    if not found:
        yield f"{_name(service)}: leads nowhere"
    for port in service["spec"]["ports"]:
        if not all(port["targetPort"] in names for names in found):
            yield f"{_name(service)}: no port {port['targetPort']}"


def store(objects: list[Json]) -> Iterator[str]:
    """Every reader of the store may reach the port in its URL."""
    settings = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
    (url,) = {data["KELVIN_STORE"] for data in settings if "KELVIN_STORE" in data}
    port, inside = store_port(url), Pod("kelvin", {"app.kubernetes.io/name": "s3"})
    readers = [Pod("kelvin", {"app.kubernetes.io/name": "snapshotter"}), Pod("kelvin-default", RUNTIME)]
    if any(each["kind"] == "DaemonSet" for each in objects):
        readers.append(Pod("kelvin-default", {"app.kubernetes.io/name": "cache-agent"}))
    for each in readers:
        if not may(objects, each, Pod(None), port) and not may(objects, each, inside, port):
            yield f"port {port} of {url} is closed for {' '.join(each.labels.values())}"


# Admission policies for the control plane's writes: group, version, resource, operations, the conditions besides the
# writer's name, and the validations. Each validation is compared as a whole, since a part of one can allow everything.
ADMISSION: Final = {
    "kelvin-controlplane": (
        ("serving.knative.dev", "*", "services", {"CREATE", "UPDATE"}),
        set(),
        {
            'object.metadata.?labels["kelvin.dev/tenant"].orValue("") == '
            'namespaceObject.metadata.?labels["kelvin.dev/tenant"].orValue("")',
            'object.metadata.?labels["app.kubernetes.io/managed-by"].orValue("") == "kelvin" && '
            'object.spec.template.metadata.?labels["app.kubernetes.io/component"].orValue("") == "runtime"',
            'object.spec.template.spec.?serviceAccountName.orValue("default") in ["", "default"] && '
            "object.spec.template.spec.?automountServiceAccountToken.orValue(true) == false",
            "(object.spec.template.spec.containers + object.spec.template.spec.?initContainers.orValue([]))"
            ".all(container, container.?env.orValue([]).all(variable, !has(variable.valueFrom)) && "
            'container.?envFrom.orValue([]).all(source, source.?secretRef.?name.orValue("") == "kelvin-store"))',
            "object.spec.template.spec.?volumes.orValue([]).all(volume, !has(volume.projected) && "
            '(!has(volume.secret) || volume.secret.secretName == "kelvin-inner-runtime"))',
        },
    ),
    "kelvin-controlplane-pods": (
        ("", "v1", "pods", {"UPDATE"}),
        {'request.namespace == "kelvin"'},
        {
            'oldObject.metadata.?labels["app.kubernetes.io/name"].orValue("") == "controlplane" && '
            'object.metadata.?labels["app.kubernetes.io/name"].orValue("") == "controlplane"'
        },
    ),
}


def admission(objects: list[Json]) -> Iterator[str]:
    """The API server checks what the control plane writes beyond its own objects."""
    by_name = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects if "spec" in each}
    account = pod_of({"kind": "Deployment", "spec": by_name["Deployment", "controlplane"]})
    assert account is not None
    writer = f'request.userInfo.username == "system:serviceaccount:kelvin:{account["serviceAccountName"]}"'
    for name, ((group, version, resource, operations), conditions, validations) in ADMISSION.items():
        policy = by_name.get(("ValidatingAdmissionPolicy", name))
        binding = by_name.get(("ValidatingAdmissionPolicyBinding", name))
        if policy is None:
            yield f"{name}: no policy"
            continue
        if binding != {"policyName": name, "validationActions": ["Deny"]}:
            yield f"{name}: no binding that denies everywhere"
        if policy.get("failurePolicy", "Fail") != "Fail":
            yield f"{name}: allows what it can't check"
        matched = [
            {key: set(values) for key, values in each.items()} for each in policy["matchConstraints"]["resourceRules"]
        ]
        wanted = {"apiGroups": {group}, "apiVersions": {version}, "resources": {resource}, "operations": operations}
        if matched != [wanted] or policy["matchConstraints"].keys() != {"resourceRules"}:
            yield f"{name}: not for each {'/'.join(sorted(operations))} of {resource}"
        if {each["expression"] for each in policy["matchConditions"]} != {writer} | conditions:
            yield f"{name}: not for the control plane's account"
        found = {" ".join(each["expression"].split()) for each in policy["validations"]}
        yield from (f"{name}: lacks {each}" for each in sorted(validations - found))
        yield from (f"{name}: unknown {each}" for each in sorted(found - validations))


RULES: Final[tuple[Rule, ...]] = (
    limits, probes, containment, images, rights, bounds, owners, accounts, secrets, availability, updates, drains,
    references, preemption, exposure, kept, store, admission,
)  # fmt: skip


def find_broken_rules(objects: list[Json]) -> list[str]:
    """Return every fault with its rule."""
    return [f"{rule.__name__}: {each}" for rule in RULES for each in rule(objects)]
