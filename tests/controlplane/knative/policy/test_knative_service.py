"""Rendered Services are valid on a real cluster: schemas, the webhook's rules, feature flags."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from controlplane.knative.policy.knative_service import (
    CACHE,
    HOST_PATH,
    INNER_TLS_DIRECTORY,
    NODE_S,
    NODE_SELECTOR,
    PRIORITY,
    PROCESS_BYTES,
    SCRATCH_BYTES,
    SPREAD,
    TOLERATIONS,
    ClusterSpec,
    ControlEndpoints,
    PodVersion,
    drain_s,
    memory_bytes,
    progress_deadline_s,
    render_service,
    service_name,
    start_limit_s,
)
from controlplane.scaling.kpa.version_scaler import scaling_spec
from controlplane.scaling.policy.kpa import resolve_target
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import Refused
from tests.cluster.kube_api.quantities import canonical

VERSION = PodVersion(
    tenant="acme", model="llama", version="3f" * 32, weight_bytes=16 << 30, kv_bytes=2 << 30, max_streams=64,
    max_scale=4, target=20.0,
)  # fmt: skip
CLUSTER = ClusterSpec(image="registry.example/kelvin@sha256:" + "0" * 64, store_url="s3://models/prod")
EVERYTHING = ClusterSpec(
    image=CLUSTER.image,
    store_url=CLUSTER.store_url,
    namespace="models",
    cores=4,
    device="nvidia.com/mig-1g.10gb",
    device_class="h100-1g",
    features=frozenset(each.flag for each in (NODE_SELECTOR, TOLERATIONS, PRIORITY, SPREAD, HOST_PATH)),
    secret="store",
    node_selector={"gpu": "h100"},
    tolerations=({"key": "spot", "operator": "Exists"},),
    priority_class="interactive",
    control=ControlEndpoints(url="https://c:7500", snapshotter_url="https://s:7501", secret="kelvin-inner-runtime"),
    cache="/var/lib/kelvin-cache",
)
CRD = Path(__file__).parents[4].parent / "shared" / "knative-crds" / "service.yaml"


def strict(schema: Any) -> Any:
    """Return the schema as an API server reads it with `fieldValidation=Strict`: undeclared fields are refused."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
    return found


def faults(rendered: dict[str, Any]) -> list[str]:
    crd = yaml.safe_load(CRD.read_text())
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(rendered)]


def test_shared_volumes_are_mounted_read_only() -> None:
    """The certificates and the tenant's cache agent are mounted read-only, and cached weights do not count as pod
    memory. Without them the pod holds its weights itself and reports to no control plane.
    """
    alone, shared = ((render_service(VERSION, each))["spec"]["template"]["spec"] for each in (CLUSTER, EVERYTHING))
    assert [each["name"] for each in alone["volumes"]] == ["data", "tmp"]
    inner, cache = shared["volumes"][2:]
    assert inner == {"name": "inner", "secret": {"secretName": "kelvin-inner-runtime"}}
    assert cache["hostPath"] == {"path": "/var/lib/kelvin-cache/acme/run", "type": "Directory"}
    (container,) = shared["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert (env["KELVIN_CONTROL"], env["KELVIN_SNAPSHOTTER"]) == ("https://c:7500", "https://s:7501")
    assert (env["KELVIN_INNER_TLS"], env["KELVIN_CACHE_AGENT"]) == (INNER_TLS_DIRECTORY, CACHE)
    mounts = {each["mountPath"]: each.get("readOnly") for each in container["volumeMounts"]}
    assert (mounts[INNER_TLS_DIRECTORY], mounts[CACHE]) == (True, True)
    assert container["resources"]["limits"]["memory"] == str(memory_bytes(VERSION, CLUSTER) - VERSION.weight_bytes)
    assert shared["volumes"][0]["emptyDir"]["sizeLimit"] == str(SCRATCH_BYTES)


@pytest.mark.parametrize(
    ("timeout_s", "want"),
    [
        pytest.param(600, 545, id="the rest of the pod's time after SIGTERM"),
        pytest.param(60, 5, id="a short timeout leaves little"),
        pytest.param(20, 1, id="no time: streams end with an error, not by a signal"),
    ],
)
def test_a_drain_ends_before_its_pod(timeout_s: int, want: int) -> None:
    """It leaves time for queue-proxy's first wait and for the steps after the drain."""
    (container,) = render_service(VERSION, replace(CLUSTER, timeout_s=timeout_s))["spec"]["template"]["spec"][
        "containers"
    ]
    assert {"name": "KELVIN_RUNTIME_DRAIN_S", "value": str(want)} in container["env"]


@pytest.mark.skipif(not CRD.exists(), reason="Knative's CRDs are not in shared/")
@pytest.mark.parametrize("cluster", [CLUSTER, EVERYTHING])
def test_rendered_service_matches_the_schema(cluster: ClusterSpec) -> None:
    """Control: one undeclared field is found."""
    rendered = render_service(VERSION, cluster)
    assert faults(rendered) == []
    rendered["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    assert len(faults(rendered)) == 1


def test_scale_annotations_match_the_local_autoscaler() -> None:
    """They are Knative's names for the settings of `controlplane/scaling/kpa/version_scaler.py`."""
    rendered = render_service(VERSION, CLUSTER)
    annotations = rendered["spec"]["template"]["metadata"]["annotations"]
    found = {name.removeprefix("autoscaling.knative.dev/"): value for name, value in annotations.items()}
    assert found == {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "min-scale": "0",
        "max-scale": "4",
        "target": "20",
        "window": "60s",
        "target-burst-capacity": "-1",
        "scale-to-zero-pod-retention-period": "30s",
        "serving.knative.dev/progress-deadline": "1800s",
        "features.knative.dev/http-full-duplex": "Enabled",
        "kelvin.dev/version": VERSION.version,
    }
    weighted = render_service(replace(VERSION, average="weighted"), CLUSTER)["spec"]["template"]["metadata"][
        "annotations"
    ]
    more = {"autoscaling.knative.dev/metric-aggregation-algorithm": "weighted-exponential"}
    assert weighted == {**annotations, **more}
    assert rendered["spec"]["template"]["spec"]["containerConcurrency"] == 72, "a full pod still receives cancellations"
    assert rendered["metadata"]["annotations"]["kelvin.dev/streams"] == "64"
    assert all(isinstance(value, str) for value in annotations.values())
    assert not any("autoscaling" in name for name in rendered["metadata"]["annotations"]), "refused there"


@pytest.mark.parametrize(
    ("memory", "written"),
    [(5 << 30, "5368709120"), (4_000_000_000, "4G"), (4_321_000_000, "4321M"), (4_000_000_001, "4000000001")],
)
def test_amounts_are_as_kubernetes_writes_them(memory: int, written: str) -> None:
    """Then a cluster's response equals the applied Service for any number of bytes."""
    version = replace(VERSION, weight_bytes=0, kv_bytes=memory - PROCESS_BYTES)
    resources = render_service(version, CLUSTER)["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == written
    for amounts in resources.values():
        assert amounts == {name: canonical(each) for name, each in amounts.items()}


def test_pod_is_restricted_and_sized_for_its_version() -> None:
    """It runs one version by digest, with its memory, a restricted security context and no service account token."""
    pod = render_service(VERSION, EVERYTHING)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][:2] == ["runtime", VERSION.version]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert int(limits["memory"]) == memory_bytes(VERSION, EVERYTHING) > VERSION.kv_bytes
    assert memory_bytes(VERSION, CLUSTER) > VERSION.weight_bytes + VERSION.kv_bytes
    assert limits["nvidia.com/mig-1g.10gb"] == requests["nvidia.com/mig-1g.10gb"] == "1"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    names = {each["name"] for each in container["env"]}
    assert not names & {"PORT", "K_SERVICE", "K_REVISION", "K_CONFIGURATION"}, "reserved"
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}, "each volume is mounted, or the webhook refuses it"
    assert (pod["nodeSelector"], pod["priorityClassName"]) == (
        {"gpu": "h100", "kelvin.dev/cache": "true"},
        "interactive",
    )


def test_store_secret_is_optional() -> None:
    """The secret may be missing. Without a name there is no reference."""
    (container,) = render_service(VERSION, EVERYTHING)["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "store", "optional": True}}]
    (container,) = render_service(VERSION, CLUSTER)["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in container


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (ClusterSpec(image="i", store_url="s3://b", node_selector={"a": "b"}), "nodeSelector"),
        (ClusterSpec(image="i", store_url="s3://b", tolerations=({"key": "a"},)), "tolerations"),
        (ClusterSpec(image="i", store_url="s3://b", priority_class="high"), "priorityClassName"),
        (
            ClusterSpec(image="i", store_url="s3://b", cache="/c"),
            "hostPath=/c: needs kubernetes.podspec-volumes-hostpath",
        ),
        (ClusterSpec(image="i", store_url="s3://b", device="amd.com/gpu"), "must be nvidia.com/gpu"),
        (ClusterSpec(image="i", store_url="s3://b", namespace="No"), "must be a DNS label"),
    ],
)
def test_what_the_cluster_would_refuse_is_refused_here(cluster: ClusterSpec, words: str) -> None:
    """The error names the field and the flag that it needs."""
    with pytest.raises(Refused) as refused:
        render_service(VERSION, cluster)
    assert words in refused.value.failure.message


def test_fields_that_need_a_flag_are_left_out_without_it() -> None:
    """Spreading over zones is optional."""
    assert SPREAD.field not in render_service(VERSION, CLUSTER)["spec"]["template"]["spec"]
    assert SPREAD.field in render_service(VERSION, EVERYTHING)["spec"]["template"]["spec"]


@pytest.mark.parametrize("model", ["m", "a" * 63, "a" * 49 + "-" + "b" * 13])
def test_service_names_are_dns_labels(model: str) -> None:
    """The name of every model is a DNS label that ends with the version's digits."""
    name = service_name(model, VERSION.version)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name)
    assert name.endswith("-" + VERSION.version[:12])
    assert "--" not in name


def test_fractional_seconds_are_refused() -> None:
    """Knative takes whole seconds."""
    with pytest.raises(Refused, match="whole seconds"):
        render_service(replace(VERSION, window_s=6.5), CLUSTER)


@pytest.mark.parametrize(("streams", "want"), [(1, 9), (64, 72), (995, 1000), (1000, 1000), (2000, 1000)])
def test_container_concurrency_exceeds_streams(streams: int, want: int) -> None:
    """It is a little above the streams of a pod, up to Knative's limit for a revision. The target stays at the
    streams.
    """
    rendered = render_service(replace(VERSION, max_streams=streams, target=None), CLUSTER)["spec"]["template"]
    assert rendered["spec"]["containerConcurrency"] == want
    assert rendered["metadata"]["annotations"]["autoscaling.knative.dev/target"] == str(streams)


@pytest.mark.parametrize("streams", [1, 4, 64, 1000])
@pytest.mark.parametrize("target", [None, 0.5, 4.0, 20.0, 64.0, 2000.0])
def test_target_never_exceeds_streams(streams: int, target: float | None) -> None:
    """As on one machine, the target is at most a pod's streams, although queue-proxy lets a few more in.

    Above 1000 streams Knative itself aims at 1000.
    """
    local = scaling_spec(ScaleSettings(target=target), streams, reachable=True)
    template = render_service(replace(VERSION, max_streams=streams, target=target), CLUSTER)["spec"]["template"]
    knative = resolve_target(
        container_concurrency=template["spec"]["containerConcurrency"],
        target=float(template["metadata"]["annotations"]["autoscaling.knative.dev/target"]),
    )
    assert knative == (local.target_value, local.total_value)
    assert local.total_value <= streams


def test_progress_deadline_covers_a_new_node() -> None:
    """A small version gets the time of a new node, a large one the time of its bytes."""
    assert progress_deadline_s(replace(VERSION, weight_bytes=1)) == NODE_S
    large = replace(VERSION, weight_bytes=200 << 30)
    assert progress_deadline_s(large) == start_limit_s(large) > NODE_S


@pytest.mark.parametrize(
    ("notice_s", "want_s"),
    [
        pytest.param(None, 545, id="a node that stays gives a pod its whole timeout"),
        pytest.param(120, 65, id="two minutes, less queue-proxy's pause and the last records"),
        pytest.param(30, 1, id="half a minute has room for no drain"),
        pytest.param(7200, 545, id="a longer notice than the timeout changes nothing"),
    ],
)
def test_drain_ends_within_a_node_s_notice(notice_s: int | None, want_s: int) -> None:
    """The runtime is not promised a longer drain than the node allows."""
    assert drain_s(replace(CLUSTER, notice_s=notice_s)) == want_s


def test_verification_reaches_pods() -> None:
    """The trust roots are required for the pod's start. Without the setting neither is rendered."""
    pod = render_service(VERSION, replace(CLUSTER, verify="require", trust="kelvin-trust"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env["KELVIN_VERIFY"] == "require"
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == env["KELVIN_TRUST_ROOTS"]]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["configMap"] == {"name": "kelvin-trust"}
    assert mount["readOnly"] is True
    (plain,) = render_service(VERSION, CLUSTER)["spec"]["template"]["spec"]["containers"]
    assert not {"KELVIN_VERIFY", "KELVIN_TRUST_ROOTS"} & {each["name"] for each in plain["env"]}
