"""Cluster settings from the environment. A value that a cluster would refuse is refused at start."""

from pathlib import Path

import pytest

from controlplane.knative.cluster_settings import ClusterSettings, read_cluster
from controlplane.knative.policy.knative_service import ClusterSpec, ControlEndpoints
from controlplane.knative.policy.pod_placement import PoolingRule, PoolSpec
from controlplane.knative.pools.pool_controller import PoolSettings
from kelvin.contracts.setting_parser import BadSetting

NEEDED = {
    "KELVIN_SCALING": "knative",
    "KELVIN_CLUSTER_IMAGE": "registry.example/kelvin@sha256:0",
    "KELVIN_CLUSTER_STORE": "s3://models/prod",
}


def test_local_scaling_ignores_cluster_settings() -> None:
    assert read_cluster({}, 1) is None
    assert read_cluster({"KELVIN_SCALING": "local", "KELVIN_CLUSTER_NODES": "x"}, 1) is None


def test_all_cluster_settings_are_rendered() -> None:
    """Every variable is in the settings that are read."""
    read = read_cluster(
        {
            **NEEDED,
            "KELVIN_CLUSTER_NAMESPACE": "platform",
            "KELVIN_CLUSTER_SECRET": "store",
            "KELVIN_CLUSTER_FEATURES": "kubernetes.podspec-nodeselector, kubernetes.podspec-tolerations,"
            "kubernetes.podspec-priorityclassname,kubernetes.podspec-volumes-hostpath",
            "KELVIN_CLUSTER_CONTROL": "https://control:7500",
            "KELVIN_CLUSTER_SNAPSHOTTER": "https://snapshotter:7501",
            "KELVIN_CLUSTER_INNER_SECRET": "inner",
            "KELVIN_CLUSTER_CACHE": "/var/lib/kelvin-cache/",
            "KELVIN_CLUSTER_DEVICE": "nvidia.com/mig-1g.10gb",
            "KELVIN_CLUSTER_DEVICE_CLASS": "h100-1g",
            "KELVIN_CLUSTER_DEVICES": "64",
            "KELVIN_CLUSTER_POOLS": "small=8589934592:2:16, large=85899345920:1:4",
            "KELVIN_CLUSTER_POOLED": "*/llama, acme/*",
            "KELVIN_CLUSTER_APART": "bank",
            "KELVIN_CONTROL_LISTEN": "0.0.0.0:7500",
            "KELVIN_CLUSTER_TIMEOUT_S": "1800",
            "KELVIN_CLUSTER_OVERLAP_S": "30",
            "KELVIN_CLUSTER_POD": "controlplane-7d9f-x2x",
            "KELVIN_CLUSTER_NODES": "example.com/gpu=h100,zone=a",
            "KELVIN_CLUSTER_TOLERATIONS": "nvidia.com/gpu,spot",
            "KELVIN_CLUSTER_PRIORITY_CLASS": "models",
            "KELVIN_VERIFY": "require",
            "KELVIN_CLUSTER_TRUST": "roots",
            "KELVIN_CLUSTER_NOTICE_S": "120",
            "KUBECONFIG": "/home/me/.kube/config",
        },
        4,
    )
    assert read is not None
    assert read.unpooled_devices == 64 - 16 - 4
    assert read == ClusterSettings(
        ClusterSpec(
            image=NEEDED["KELVIN_CLUSTER_IMAGE"],
            store_url="s3://models/prod",
            cores=4,
            device="nvidia.com/mig-1g.10gb",
            device_class="h100-1g",
            features=frozenset(
                f"kubernetes.podspec-{each}"
                for each in ("nodeselector", "tolerations", "priorityclassname", "volumes-hostpath")
            ),
            timeout_s=1800,
            secret="store",
            node_selector={"example.com/gpu": "h100", "zone": "a"},
            tolerations=({"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}),
            priority_class="models",
            control=ControlEndpoints(
                url="https://control:7500", snapshotter_url="https://snapshotter:7501", secret="inner"
            ),
            cache="/var/lib/kelvin-cache",
            verify="require",
            trust="roots",
            notice_s=120,
        ),
        "platform",
        Path("/home/me/.kube/config"),
        64,
        PoolSettings(
            (PoolSpec("small", 8 << 30, 2, 16), PoolSpec("large", 80 << 30, 1, 4)),
            PoolingRule(("*/llama", "acme/*"), frozenset({"bank"})),
        ),
        30.0,
        "controlplane-7d9f-x2x",
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"KELVIN_SCALING": "swarm"}, "KELVIN_SCALING=swarm: must be one of local, knative", id="scaler"),
        pytest.param({"KELVIN_CLUSTER_IMAGE": ""}, "KELVIN_CLUSTER_IMAGE=: is required", id="no image"),
        pytest.param({"KELVIN_CLUSTER_IMAGE": "r/kelvin@sha256:…"}, "must be an image", id="an example's dots"),
        pytest.param({"KELVIN_CLUSTER_SECRET": "Store"}, "KELVIN_CLUSTER_SECRET=Store: must be a name", id="a secret"),
        pytest.param({"KELVIN_CLUSTER_TRUST": "a_b"}, "KELVIN_CLUSTER_TRUST=a_b: must be a name", id="a config map"),
        pytest.param({"KELVIN_CLUSTER_PRIORITY_CLASS": "High"}, "High: must be a name", id="a priority class"),
        pytest.param(
            {
                "KELVIN_CLUSTER_CONTROL": "https://x",
                "KELVIN_CLUSTER_INNER_SECRET": "Inner",
                "KELVIN_CLUSTER_SNAPSHOTTER": "https://x",
            },
            "KELVIN_CLUSTER_INNER_SECRET=Inner: must be a name",
            id="a certificate secret that is no name",
        ),
        pytest.param(
            {"KELVIN_CLUSTER_STORE": f"s3://models/{'a' * 121}"},
            f"KELVIN_CLUSTER_STORE=s3://models/{'a' * 121}: its prefix must have at most 120",
            id="a long prefix",
        ),
        pytest.param({"KELVIN_CLUSTER_STORE": ""}, "KELVIN_CLUSTER_STORE=: is required", id="no store"),
        pytest.param(
            {"KELVIN_CLUSTER_STORE": "file:///x"},
            "KELVIN_CLUSTER_STORE=file:///x: must be s3://BUCKET/PREFIX",
            id="a store on a local disk",
        ),
        pytest.param(
            {"KELVIN_CLUSTER_STORE": "s3://key:ses/ame@models/prod"},
            "KELVIN_CLUSTER_STORE=s3://…@models/prod: must be s3://BUCKET/PREFIX",
            id="a store with credentials",
        ),
        pytest.param(
            {"KELVIN_CLUSTER_STORE": "s3://models/prod?secret=sesame"},
            "KELVIN_CLUSTER_STORE=s3://models/prod: takes each of",
            id="a store that pods would refuse",
        ),
        pytest.param({"KELVIN_CLUSTER_NAMESPACE": "Not One"}, "must be a DNS label", id="an invalid namespace"),
        pytest.param({"KELVIN_CLUSTER_POD": "One"}, "must be the name of this process's own pod", id="a pod"),
        pytest.param({"KELVIN_CLUSTER_FEATURES": "gpu"}, "each must be of kubernetes.podspec-", id="a feature"),
        pytest.param({"KELVIN_CLUSTER_DEVICE": "tpu"}, "must be nvidia.com/gpu", id="an unknown device"),
        pytest.param(
            {"KELVIN_CLUSTER_DEVICE_CLASS": "h" * 65}, "h: must be 1 to 64 printable ASCII", id="a device class"
        ),
        pytest.param({"KELVIN_CLUSTER_DEVICES": "-1"}, "KELVIN_CLUSTER_DEVICES=-1: must be 0 or more", id="devices"),
        pytest.param({"KELVIN_CLUSTER_OVERLAP_S": "-1"}, "KELVIN_CLUSTER_OVERLAP_S=-1: must be 0", id="an overlap"),
        pytest.param({"KELVIN_CLUSTER_NODES": "gpu"}, "each must be KEY=VALUE", id="a label without a value"),
        pytest.param({"KELVIN_CLUSTER_TOLERATIONS": "a b"}, "each must be a taint's key", id="a taint"),
        pytest.param(
            {"KELVIN_CLUSTER_CONTROL": "https://x"}, "KELVIN_CLUSTER_SNAPSHOTTER=: is required", id="no snapshotter"
        ),
        pytest.param(
            {
                "KELVIN_CLUSTER_CONTROL": "https://x",
                "KELVIN_CLUSTER_INNER_SECRET": "inner",
                "KELVIN_CLUSTER_SNAPSHOTTER": "http://x",
            },
            "KELVIN_CLUSTER_SNAPSHOTTER=http://x: must begin with https://",
            id="a URL without TLS",
        ),
        pytest.param(
            {"KELVIN_VERIFY": "require"}, "is required with KELVIN_VERIFY=require: a config map", id="no trust roots"
        ),
        pytest.param(
            {"KELVIN_CLUSTER_CACHE": "/x", "KELVIN_CLUSTER_FEATURES": "kubernetes.podspec-volumes-hostpath"},
            "needs kubernetes.podspec-nodeselector",
            id="a cache without node selectors",
        ),
        pytest.param({"KELVIN_CLUSTER_CACHE": "x"}, "KELVIN_CLUSTER_CACHE=x: must be an absolute path", id="a cache"),
        pytest.param({"KELVIN_CLUSTER_CACHE": "/x"}, "needs kubernetes.podspec-volumes-hostpath", id="a cache's flag"),
        pytest.param({"KELVIN_CLUSTER_POOLS": "x=1:3:2"}, "each must be NAME=BYTES:WAITING:MOST", id="a low MOST"),
        pytest.param({"KELVIN_CLUSTER_POOLS": "a-b=1:1:2"}, "NAME is 1 to 20 lower-case letters", id="a pool's name"),
        pytest.param({"KELVIN_CLUSTER_POOLS": "x=1:0:0"}, "MOST is 1 to 1000", id="a pool without pods"),
        pytest.param({"KELVIN_CLUSTER_POOLS": "x=1:1:2,x=2:1:2"}, "each NAME must be unique", id="equal names"),
        pytest.param({"KELVIN_CLUSTER_POOLS": "x=1:1:2"}, "needs KELVIN_CLUSTER_CONTROL", id="no control URL"),
        pytest.param(
            {
                "KELVIN_CLUSTER_POOLS": "x=1:1:2",
                "KELVIN_CLUSTER_POOLED": "*/*",
                "KELVIN_CLUSTER_DEVICES": "1",
                "KELVIN_CONTROL_LISTEN": "0.0.0.0:7500",
                "KELVIN_CLUSTER_CONTROL": "https://x",
                "KELVIN_CLUSTER_INNER_SECRET": "inner",
                "KELVIN_CLUSTER_SNAPSHOTTER": "https://x",
            },
            "KELVIN_CLUSTER_POOLS=x=1:1:2: has more pods than 1 devices",
            id="more pods than devices",
        ),
        pytest.param(
            {
                "KELVIN_CLUSTER_POOLS": "x=1:1:2",
                "KELVIN_CLUSTER_CONTROL": "https://x",
                "KELVIN_CLUSTER_INNER_SECRET": "inner",
                "KELVIN_CLUSTER_SNAPSHOTTER": "https://x",
            },
            "KELVIN_CLUSTER_POOLS=x=1:1:2: needs KELVIN_CONTROL_LISTEN",
            id="pools without a listen address",
        ),
        pytest.param(
            {
                "KELVIN_CLUSTER_POOLS": "x=1:1:2",
                "KELVIN_CONTROL_LISTEN": "0.0.0.0:7500",
                "KELVIN_CLUSTER_CONTROL": "https://x",
                "KELVIN_CLUSTER_INNER_SECRET": "inner",
                "KELVIN_CLUSTER_SNAPSHOTTER": "https://x",
            },
            "KELVIN_CLUSTER_POOLED=: is required with KELVIN_CLUSTER_POOLS",
            id="pools without pooled models",
        ),
        pytest.param({"KELVIN_CLUSTER_TIMEOUT_S": "0"}, "must be 1 or more", id="a timeout of zero"),
        pytest.param(
            {"KELVIN_CLUSTER_PRIORITY_CLASS": "models"},
            "KELVIN_CLUSTER_PRIORITY_CLASS=models: needs kubernetes.podspec-priorityclassname in KELVIN_CLUSTER_FEAT",
            id="a field that the cluster does not allow",
        ),
    ],
)
def test_invalid_cluster_settings_are_refused(changes: dict[str, str], says: str) -> None:
    """The error has the name, the value and the rule."""
    with pytest.raises(BadSetting) as refused:
        read_cluster({**NEEDED, **changes}, 1)
    assert says in str(refused.value)
