"""Settings of a control plane whose versions run on a cluster. They count only with `KELVIN_SCALING=knative`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from controlplane.knative.policy.knative_service import (
    DEVICE_RULE,
    FEATURES,
    HOST_PATH,
    IMAGE_RULE,
    NODE_SELECTOR,
    PRIORITY,
    TIMEOUT_S,
    TOLERATIONS,
    ZERO_INITIAL_SCALE,
    ClusterSpec,
    ControlEndpoints,
    is_image,
    parse_cluster_store,
)
from controlplane.knative.policy.pod_placement import PoolingRule, PoolSpec
from controlplane.knative.pools.pool_controller import PoolSettings
from kelvin.contracts import setting_parser
from kelvin.contracts.errors import Refused
from kelvin.contracts.names import DEVICE_CLASS_RULE, is_device_class, require_dns_label
from kelvin.contracts.setting_parser import BadSetting

SCALING: Final = "KELVIN_SCALING"
MAX_DEVICES: Final = 1_000_000
OVERLAP_S: Final = 120.0  # two of Knative's windows: in the second, a version has the replicas that the first needed
_KEY: Final = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # key of a label or a taint
MAX_PODS: Final = 1000  # of a pool
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PATTERN: Final = re.compile(rf"(\*|{_LABEL.pattern})/(\*|{_LABEL.pattern})")
_POOL: Final = re.compile(r"([a-z0-9]{1,20})=([0-9]{1,15}):([0-9]{1,4}):([0-9]{1,4})")
_NAME: Final = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
NAME_CHARS: Final = 253
NAME_RULE: Final = "must be a name of a-z, 0-9, '-' and '.', with a letter or digit at both ends"
_VALUE: Final = re.compile(r"[A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of the pods, the namespace in which Kelvin itself runs, and the number of devices."""

    pods: ClusterSpec
    namespace: str
    kubeconfig: Path | None = None  # None: use the service account of this process's pod
    devices: int | None = None  # None: no bound for all versions together
    pools: PoolSettings = field(default_factory=PoolSettings)
    overlap_s: float = OVERLAP_S  # how long the previous version helps a newly named one
    pod: str | None = None  # this process's own pod, whose label marks the leader

    @property
    def unpooled_devices(self) -> int | None:
        """Return the devices that are left for pods outside of pools; None if devices are unbounded."""
        return None if self.devices is None else self.devices - sum(each.maximum for each in self.pools.pools)


def read_cluster(env: Mapping[str, str], cores: int) -> ClusterSettings | None:
    """Return the settings; None if one machine runs the versions. A pod gets `cores` cores. Raises BadSetting."""
    if setting_parser.choice(env, SCALING, "local", ("local", "knative")) == "local":
        return None
    known = (*(each.flag for each in FEATURES), ZERO_INITIAL_SCALE)
    pods = ClusterSpec(
        image=setting_parser.text(env, "KELVIN_CLUSTER_IMAGE"),
        store_url=setting_parser.text(env, "KELVIN_CLUSTER_STORE"),
        cores=cores,
        device=_read_device(env, "KELVIN_CLUSTER_DEVICE"),
        device_class=_read_device_class(env, "KELVIN_CLUSTER_DEVICE_CLASS"),
        features=frozenset(
            _read_list(env, "KELVIN_CLUSTER_FEATURES", lambda key: key in known, f"of {', '.join(known)}")
        ),
        timeout_s=setting_parser.integer(env, "KELVIN_CLUSTER_TIMEOUT_S", TIMEOUT_S, low=1, high=86_400),
        secret=_read_object_name(env, "KELVIN_CLUSTER_SECRET"),
        node_selector=dict(_read_pairs(env, "KELVIN_CLUSTER_NODES")),
        tolerations=tuple(
            {"key": key, "operator": "Exists"}
            for key in _read_list(env, "KELVIN_CLUSTER_TOLERATIONS", _KEY.fullmatch, "a taint's key")
        ),
        priority_class=_read_object_name(env, "KELVIN_CLUSTER_PRIORITY_CLASS"),
        control=_read_control(env),
        cache=_read_cache(env, "KELVIN_CLUSTER_CACHE"),
        verify=setting_parser.choice(env, "KELVIN_VERIFY", "off", ("require", "warn", "off")),
        trust=_read_object_name(env, "KELVIN_CLUSTER_TRUST"),
        notice_s=setting_parser.integer(env, "KELVIN_CLUSTER_NOTICE_S", 0, low=0, high=86_400) or None,
    )
    if not is_image(pods.image):
        raise BadSetting("KELVIN_CLUSTER_IMAGE", pods.image, IMAGE_RULE)
    try:
        parse_cluster_store(pods.store_url)
    except BadSetting as bad:
        raise BadSetting("KELVIN_CLUSTER_STORE", bad.shown_value, bad.rule) from None
    if pods.verify != "off" and pods.trust is None:
        rule = f"is required with KELVIN_VERIFY={pods.verify}: a config map of trust roots in each tenant's namespace"
        raise BadSetting("KELVIN_CLUSTER_TRUST", "", rule)
    _check_features(env, pods)
    kubeconfig = Path(env["KUBECONFIG"]) if env.get("KUBECONFIG") else None
    namespace = _namespace(setting_parser.text(env, "KELVIN_CLUSTER_NAMESPACE", "kelvin"))
    devices = setting_parser.integer(env, "KELVIN_CLUSTER_DEVICES", 0, low=0, high=MAX_DEVICES) or None
    overlap_s = setting_parser.number(env, "KELVIN_CLUSTER_OVERLAP_S", OVERLAP_S, low=0, high=86_400)
    pod = _read_object_name(env, "KELVIN_CLUSTER_POD", "must be the name of this process's own pod")
    found = ClusterSettings(pods, namespace, kubeconfig, devices, _read_pools(env, pods), overlap_s, pod)
    if found.unpooled_devices is not None and found.unpooled_devices < 0:
        raise BadSetting("KELVIN_CLUSTER_POOLS", env["KELVIN_CLUSTER_POOLS"], f"has more pods than {devices} devices")
    return found


def _read_pools(env: Mapping[str, str], pods: ClusterSpec) -> PoolSettings:
    """Return the pools, and the models and tenants that may use them. Without KELVIN_CLUSTER_POOLS there is no pool."""
    name, shared, apart = "KELVIN_CLUSTER_POOLS", "KELVIN_CLUSTER_POOLED", "KELVIN_CLUSTER_APART"
    rule = (
        "NAME=BYTES:WAITING:MOST, where NAME is 1 to 20 lower-case letters and digits, MOST is 1 to 1000, and WAITING "
        "is no more than MOST"
    )
    found = tuple(_parse_pool(part) for part in _read_list(env, name, lambda part: _parse_pool(part) is not None, rule))
    pools = tuple(each for each in found if each is not None)
    if len({each.name for each in pools}) < len(pools):
        raise BadSetting(name, env[name], "each NAME must be unique")
    if not pools:
        return PoolSettings()
    if pods.control is None:
        raise BadSetting(
            name,
            env[name],
            "needs KELVIN_CLUSTER_CONTROL: pods obey only a known certificate",
        )
    if not env.get("KELVIN_CONTROL_LISTEN"):
        raise BadSetting(
            name, env[name], "needs KELVIN_CONTROL_LISTEN: without it, the certificate that pods require is not read"
        )
    models = _read_list(env, shared, _PATTERN.fullmatch, "TENANT/MODEL, or * for either")
    if not models:
        raise BadSetting(shared, env.get(shared, ""), f"is required with {name}")
    excluded_tenants = frozenset(_read_list(env, apart, _LABEL.fullmatch, "a tenant"))
    return PoolSettings(pools, PoolingRule(models, excluded_tenants))


def _parse_pool(part: str) -> PoolSpec | None:
    """Return the pool that `part` describes; None if it is malformed."""
    if (read := _POOL.fullmatch(part)) is None:
        return None
    weight_bytes, waiting, maximum = (int(each) for each in read.groups()[1:])
    return PoolSpec(read[1], weight_bytes, waiting, maximum) if waiting <= maximum and 0 < maximum <= MAX_PODS else None


def _namespace(value: str) -> str:
    try:
        return require_dns_label(value, "namespace")
    except Refused:
        raise BadSetting("KELVIN_CLUSTER_NAMESPACE", value, "must be a DNS label") from None


def _read_object_name(env: Mapping[str, str], name: str, rule: str = NAME_RULE) -> str | None:
    """Return the name of an object of the cluster; None if the setting is empty."""
    value = env.get(name)
    if value and (len(value) > NAME_CHARS or not _NAME.fullmatch(value)):
        raise BadSetting(name, value, rule)
    return value or None


def _read_control(env: Mapping[str, str]) -> ControlEndpoints | None:
    """Return both URLs and the secret; None if none of them is set."""
    names = ("KELVIN_CLUSTER_CONTROL", "KELVIN_CLUSTER_SNAPSHOTTER", "KELVIN_CLUSTER_INNER_SECRET")
    if not any(env.get(name) for name in names):
        return None
    url, snapshotter_url, secret = (setting_parser.text(env, name) for name in names)
    for name, value in zip(names, (url, snapshotter_url), strict=False):
        if not value.startswith("https://"):
            raise BadSetting(name, value, "must begin with https://")
    _read_object_name(env, names[2])
    return ControlEndpoints(url=url, snapshotter_url=snapshotter_url, secret=secret)


def _read_cache(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name)
    if value and not value.startswith("/"):
        raise BadSetting(name, value, "must be an absolute path")
    return value.rstrip("/") if value else None


def _read_device(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name)
    if value and not value.startswith("nvidia.com/"):
        raise BadSetting(name, value, DEVICE_RULE)
    return value or None


def _read_device_class(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name)
    if value and not is_device_class(value):
        raise BadSetting(name, value, DEVICE_CLASS_RULE)
    return value or None


def _read_list(env: Mapping[str, str], name: str, is_valid: Callable[[str], object], rule: str) -> tuple[str, ...]:
    value = env.get(name, "")
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not all(map(is_valid, found)):
        raise BadSetting(name, value, f"each must be {rule}")
    return found


def _read_pairs(env: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    def is_valid(part: str) -> bool:
        key, separator, value = part.partition("=")
        return bool(separator and _KEY.fullmatch(key) and _VALUE.fullmatch(value))

    return [
        (key, value) for key, _, value in (part.partition("=") for part in _read_list(env, name, is_valid, "KEY=VALUE"))
    ]


def _check_features(env: Mapping[str, str], pods: ClusterSpec) -> None:
    """Raise BadSetting if pods would use a field that the cluster does not allow: it would refuse each of them."""
    wanted = {
        "KELVIN_CLUSTER_NODES": (bool(pods.node_selector), NODE_SELECTOR),
        "KELVIN_CLUSTER_TOLERATIONS": (bool(pods.tolerations), TOLERATIONS),
        "KELVIN_CLUSTER_CACHE": (pods.cache is not None, HOST_PATH),
        "KELVIN_CLUSTER_PRIORITY_CLASS": (pods.priority_class is not None, PRIORITY),
    }
    for name, (is_wanted, feature) in wanted.items():
        if is_wanted and feature.flag not in pods.features:
            raise BadSetting(name, env[name], f"needs {feature.flag} in KELVIN_CLUSTER_FEATURES")
    if pods.cache is not None and NODE_SELECTOR.flag not in pods.features:
        rule = f"needs {NODE_SELECTOR.flag} in KELVIN_CLUSTER_FEATURES: its pods go to nodes with a cache alone"
        raise BadSetting("KELVIN_CLUSTER_CACHE", env["KELVIN_CLUSTER_CACHE"], rule)
