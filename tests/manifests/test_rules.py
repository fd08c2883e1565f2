"""The base breaks no rule, and each rule fails for an object that breaks it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.app.role_label import LEADER
from controlplane.knative.policy.object_labels import ROLE
from tests.manifests import rules
from tests.manifests.controllers import evictable, updated
from tests.manifests.kustomize_build import Json, crds, find, knative, of_base, plain, pod_of

Harm = Callable[[list[Json]], object]


def _pod(objects: list[Json], name: str = "activator") -> Json:
    found = pod_of(find(objects, "Deployment", name))
    assert found is not None
    return found


def _one(objects: list[Json], name: str = "activator") -> Json:
    found: Json = _pod(objects, name)["containers"][0]
    return found


def _drop(objects: list[Json], kind: str, name: str) -> None:
    objects.remove(find(objects, kind, name))


def _set(target: Json, **values: Any) -> None:
    target.update(values)


def _rolling(objects: list[Json], name: str) -> Json:
    found: Json = find(objects, "Deployment", name)["spec"]["strategy"]["rollingUpdate"]
    return found


def _budget(objects: list[Json], name: str) -> Json:
    found: Json = find(objects, "PodDisruptionBudget", name)["spec"]
    return found


def _policy(objects: list[Json]) -> Json:
    """Return the admission policy for Services."""
    found: Json = find(objects, "ValidatingAdmissionPolicy", "kelvin-controlplane")["spec"]
    return found


def _three(objects: list[Json]) -> list[Json]:
    """Set three control planes, as with zones."""
    find(objects, "Deployment", "controlplane")["spec"].update(replicas=3)
    return objects


def test_base() -> None:
    """This holds for plain YAML and for the built objects."""
    assert rules.find_broken_rules(plain()) == []
    assert rules.find_broken_rules(of_base()) == []


RIGHTS = "kelvin-controlplane"
POLICY = "ValidatingAdmissionPolicy"
ELSEWHERE = "s3://ours/versions?endpoint=http://s3.example.com:9000"
HARMS: tuple[tuple[Harm, str], ...] = (
    (lambda o: _one(o)["resources"]["limits"].pop("memory"), "limits: activator: no limits of memory"),
    (lambda o: _one(o)["resources"].pop("requests"), "limits: activator: no requests of cpu"),
    (lambda o: _pod(o).update(initContainers=[{"name": "x", "image": "y"}]), "limits: x: no limits of cpu"),
    (lambda o: _one(o).pop("livenessProbe"), "probes: activator: no livenessProbe"),
    (lambda o: _one(o, "snapshotter").pop("startupProbe"), "probes: snapshotter: no startupProbe"),
    (lambda o: _one(o).pop("securityContext"), "containment: activator: readOnlyRootFilesystem is not True"),
    (lambda o: _set(_one(o)["securityContext"], privileged=True), "containment: activator: privileged is not False"),
    (
        lambda o: _set(_one(o)["securityContext"], capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        "containment: activator: capabilities is not {'drop': ['ALL']}",
    ),
    (lambda o: _set(_one(o)["ports"][0], hostPort=443), "containment: activator: a port of the node"),
    (lambda o: _set(_pod(o)["securityContext"], runAsUser=0), "containment: a pod of root"),
    (lambda o: _set(_pod(o), hostNetwork=True), "containment: hostNetwork of the node"),
    (lambda o: _set(_pod(o)["volumes"][0], hostPath={"path": "/"}), "containment: data: a directory of the node"),
    (lambda o: _pod(o)["volumes"][0]["emptyDir"].clear(), "containment: data: without a bound"),
    (
        lambda o: _set(_one(o), image="registry.example.com/kelvin:latest"),
        "images: activator: registry.example.com/kel",
    ),
    (lambda o: _set(_one(o), image="kelvin"), "images: activator: kelvin"),
    (
        lambda o: find(o, "Role", "controlplane")["rules"][0]["verbs"].append("*"),
        "rights: Role controlplane: a wildcard",
    ),
    (
        lambda o: find(o, "ClusterRole", RIGHTS)["rules"][0].update(resources=["services/*"]),
        "rights: ClusterRole kelvin-controlplane: a wildcard",
    ),
    (
        lambda o: find(o, "ClusterRole", RIGHTS)["rules"][0].update(apiGroups=[""], resources=["secrets"]),
        "rights: ClusterRole kelvin-controlplane: a way to more rights",
    ),
    (lambda o: _drop(o, "Role", "controlplane"), "rights: RoleBinding controlplane: no such role"),
    (
        lambda o: find(o, "ClusterRoleBinding", RIGHTS)["subjects"][0].update(name="default"),
        "rights: ClusterRoleBinding kelvin-controlplane: no service account of ours",
    ),
    (
        lambda o: find(o, "ClusterRole", RIGHTS)["rules"][0]["verbs"].append("patch"),
        "bounds: ClusterRole kelvin-controlplane: writes services everywhere",
    ),
    (
        lambda o: find(o, "ClusterRole", "kelvin-tenant")["rules"][1].pop("resourceNames"),
        "rights: ClusterRole kelvin-tenant: a way to more rights",
    ),
    (
        lambda o: find(o, "ClusterRole", RIGHTS)["rules"].append(find(o, "ClusterRole", "kelvin-tenant")["rules"][1]),
        "bounds: ClusterRole kelvin-controlplane: reads secrets everywhere",
    ),
    (
        lambda o: find(o, "ClusterRole", RIGHTS)["rules"].pop(),
        "owners: ClusterRole kelvin-controlplane: makes modelversions that are not to be of models",
    ),
    (lambda o: _set(_pod(o), automountServiceAccountToken=True), "accounts: Deployment activator: its token"),
    (lambda o: _pod(o).pop("serviceAccountName"), "accounts: Deployment activator: no account default"),
    (
        lambda o: find(o, "ServiceAccount", "activator").pop("automountServiceAccountToken"),
        "accounts: ServiceAccount activator: a token for everybody",
    ),
    (lambda o: _pod(o).pop("enableServiceLinks"), "accounts: Deployment activator: names of services"),
    (
        lambda o: o.append({"kind": "Secret", "metadata": {"name": "x"}, "data": {}}),
        "secrets: Secret x: lies in a repository",
    ),
    (lambda o: _pod(o)["volumes"][2]["secret"].pop("defaultMode"), "secrets: Deployment activator: inner is readable"),
    (
        lambda o: _one(o)["env"].append({"name": "KELVIN_REDIS", "value": "redis://:x@y"}),
        "secrets: activator: KELVIN_REDIS is written out",
    ),
    (lambda o: _drop(o, "PodDisruptionBudget", "activator"), "availability: activator: no PodDisruptionBudget"),
    (lambda o: _pod(o, "controlplane").pop("affinity"), "availability: controlplane: all on one node"),
    (
        lambda o: find(o, "Deployment", "activator")["spec"].update(replicas=2),
        "availability: activator: an apply undoes its autoscaler's work",
    ),
    (
        lambda o: _set(_rolling(o, "controlplane"), maxUnavailable="100%"),
        "updates: controlplane: an update may end all 2 at once",
    ),
    (
        lambda o: _set(find(o, "Deployment", "controlplane")["spec"], strategy={"type": "Recreate"}),
        "updates: controlplane: an update may end all 2 at once",
    ),
    (
        lambda o: _set(_budget(o, "controlplane"), maxUnavailable="100%"),
        "drains: controlplane: all 2 may be evicted at once",
    ),
    (
        lambda o: _set(_budget(_three(o), "controlplane"), maxUnavailable="100%"),
        "drains: controlplane: all 3 may be evicted at once",
    ),
    (
        lambda o: find(o, "Service", "controlplane")["spec"]["selector"].update(x="y"),
        "references: Service controlplane: leads nowhere",
    ),
    (
        lambda o: _set(_budget(o, "activator"), maxUnavailable=0),
        "drains: activator: none of 2 may be evicted",
    ),
    (
        lambda o: find(o, "PriorityClass", "kelvin-runtime").pop("preemptionPolicy"),
        "preemption: PriorityClass kelvin-runtime: preempts",
    ),
    (
        lambda o: o.append({**find(o, "Deployment", "snapshotter"), "kind": "DaemonSet"}),
        "preemption: DaemonSet snapshotter: takes room on every node",
    ),
    (
        lambda o: find(o, "Service", "activator")["spec"]["ports"].append({"port": 7480, "targetPort": "health"}),
        "exposure: Service activator: leads to figures",
    ),
    (lambda o: o.extend(knative()), "kept: ConfigMap config-features: goes with what is Kelvin's"),
    (lambda o: o.extend(crds()), "kept: CustomResourceDefinition models.kelvin.dev: goes with what is Kelvin's"),
    (
        lambda o: find(o, "PersistentVolumeClaim", "snapshotter")["metadata"].pop("annotations"),
        "kept: PersistentVolumeClaim snapshotter: is pruned",
    ),
    (lambda o: _drop(o, "PriorityClass", "kelvin-platform"), "references: Deployment activator: no such priority"),
    (
        lambda o: find(o, "ConfigMap", "kelvin-controlplane")["data"].pop("KELVIN_CLUSTER_PRIORITY_CLASS"),
        "references: PriorityClass kelvin-runtime: nobody has it",
    ),
    (lambda o: _drop(o, "ConfigMap", "kelvin-common"), "references: Deployment activator: no settings kelvin-common"),
    (
        lambda o: _set(_pod(o, "snapshotter")["containers"][1]["env"][0]["valueFrom"]["configMapKeyRef"], name="x"),
        "references: Deployment snapshotter: no settings x",
    ),
    (lambda o: _drop(o, "PersistentVolumeClaim", "snapshotter"), "references: Deployment snapshotter: no claim snap"),
    (lambda o: _one(o)["volumeMounts"].pop(), "references: Deployment activator: once is not both"),
    (
        lambda o: find(o, "Deployment", "activator")["spec"]["selector"]["matchLabels"].update(x="y"),
        "references: Deployment activator: chooses other pods",
    ),
    (
        lambda o: find(o, "Service", "activator")["spec"]["selector"].update(x="y"),
        "references: Service activator: leads nowhere",
    ),
    (
        lambda o: find(o, "Service", "activator")["spec"]["ports"][0].update(targetPort="http"),
        "references: Service activator: no port http",
    ),
    (
        lambda o: _set(find(o, "ConfigMap", "kelvin-snapshotter")["data"], KELVIN_STORE=ELSEWHERE),
        f"store: port 9000 of {ELSEWHERE} is closed for snapshotter",
    ),
    (
        lambda o: _set(find(o, "ConfigMap", "kelvin-snapshotter")["data"], KELVIN_STORE=ELSEWHERE),
        f"store: port 9000 of {ELSEWHERE} is closed for kelvin runtime",
    ),
    (lambda o: _drop(o, POLICY, RIGHTS), "admission: kelvin-controlplane: no policy"),
    (lambda o: _drop(o, POLICY, f"{RIGHTS}-pods"), "admission: kelvin-controlplane-pods: no policy"),
    (lambda o: _drop(o, f"{POLICY}Binding", RIGHTS), "admission: kelvin-controlplane: no binding that denies"),
    (lambda o: _drop(o, f"{POLICY}Binding", f"{RIGHTS}-pods"), "admission: kelvin-controlplane-pods: no binding"),
    (
        lambda o: _set(find(o, f"{POLICY}Binding", RIGHTS)["spec"], validationActions=["Warn"]),
        "admission: kelvin-controlplane: no binding that denies",
    ),
    (
        lambda o: _set(find(o, f"{POLICY}Binding", RIGHTS)["spec"], matchResources={"namespaceSelector": {}}),
        "admission: kelvin-controlplane: no binding that denies everywhere",
    ),
    (lambda o: _set(_policy(o), failurePolicy="Ignore"), "admission: kelvin-controlplane: allows what it can't check"),
    (
        lambda o: _policy(o)["matchConstraints"]["resourceRules"][0]["operations"].remove("UPDATE"),
        "admission: kelvin-controlplane: not for each CREATE/UPDATE of services",
    ),
    (
        lambda o: _policy(o)["matchConstraints"].update(objectSelector={"matchLabels": {"x": "y"}}),
        "admission: kelvin-controlplane: not for each CREATE/UPDATE of services",
    ),
    (
        lambda o: _set(_policy(o)["matchConditions"][0], expression="false"),
        "admission: kelvin-controlplane: not for the control plane's account",
    ),
    (
        lambda o: _pod(o, "controlplane").update(serviceAccountName="activator"),
        "admission: kelvin-controlplane: not for the control plane's account",
    ),
    (
        lambda o: _policy(o)["validations"].pop(0),
        'admission: kelvin-controlplane: lacks object.metadata.?labels["kelvin.dev/tenant"]',
    ),
    (
        lambda o: _policy(o)["validations"].pop(),
        "admission: kelvin-controlplane: lacks object.spec.template.spec.?volumes",
    ),
    (
        lambda o: _set(_policy(o)["validations"][2], expression="true"),
        "admission: kelvin-controlplane: lacks object.spec.template.spec.?serviceAccountName",
    ),
    (
        lambda o: _set(_policy(o)["validations"][3], expression="true"),
        "admission: kelvin-controlplane: lacks (object.spec.template.spec.containers",
    ),
    (lambda o: _drop(o, "Deployment", "activator"), "references: HorizontalPodAutoscaler activator: scales nothing"),
)


@pytest.mark.parametrize(("harm", "fault"), HARMS, ids=[fault for _, fault in HARMS])
def test_broken_manifest_rule_is_found(harm: Harm, fault: str) -> None:
    """The fault names the object."""
    objects = copy.deepcopy(plain())
    harm(objects)
    assert [each for each in rules.find_broken_rules(objects) if each.startswith(fault)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_control_planes_are_updated_and_drained(replicas: int) -> None:
    """Followers are ready, too. Control: if only the leader were ready, an update would keep old pods for ever, and its
    node could not be drained.
    """
    objects = of_base()
    strategy, budget = find(objects, "Deployment", "controlplane")["spec"]["strategy"], _budget(objects, "controlplane")
    assert (updated(replicas, strategy), evictable(budget, replicas)) == ((0, replicas), 1)
    assert updated(replicas, strategy, ready=1)[0] > 0
    assert evictable(budget, replicas, ready=1) == 0


def test_the_control_plane_s_service_selects_the_leader() -> None:
    """It selects by a label that control planes write to their own pods. `rules.admission` covers other pods."""
    objects = of_base()
    assert find(objects, "Service", "controlplane")["spec"]["selector"][ROLE] == LEADER
    template = find(objects, "Deployment", "controlplane")["spec"]["template"]
    assert ROLE not in template["metadata"]["labels"]
    assert "KELVIN_CLUSTER_POD" in {each["name"] for each in template["spec"]["containers"][0]["env"]}
    (rule,) = [each for each in find(objects, "Role", "controlplane")["rules"] if each["resources"] == ["pods"]]
    assert set(rule["verbs"]) == {"list", "patch"}
