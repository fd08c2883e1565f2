"""What Knative's validating webhook refuses in the spec of a Revision, by its feature flags, and what it warns of.

From webhook_validation and feature_flags; the rules are serving/k8s_validation.go and fieldmask.go at 98e5ef9. A flag
is "disabled" (the default, but for DEFAULTS), "allowed" or "enabled": a field may be set where it is not disabled, what
supports a volume must be enabled.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from tests.cluster.answers import Json
from tests.cluster.knative_annotations import INT32, Fault
from tests.cluster.knative_defaults import HANDLERS
from tests.cluster.objects import SUBDOMAIN, SUBDOMAIN_RULE

DEFAULTS: Final = {"multi-container": "enabled", "kubernetes.podspec-volumes-emptydir": "enabled"}
POD: Final = "kubernetes.podspec-"
FLAGGED: Final = {
    "nodeSelector": f"{POD}nodeselector",
    "tolerations": f"{POD}tolerations",
    "affinity": f"{POD}affinity",
    "topologySpreadConstraints": f"{POD}topologyspreadconstraints",
    "priorityClassName": f"{POD}priorityclassname",
    "runtimeClassName": f"{POD}runtimeclassname",
    "schedulerName": f"{POD}schedulername",
    "hostAliases": f"{POD}hostaliases",
    "dnsPolicy": f"{POD}dnspolicy",
    "dnsConfig": f"{POD}dnsconfig",
    "hostNetwork": f"{POD}hostnetwork",
    "hostPID": f"{POD}hostpid",
    "hostIPC": f"{POD}hostipc",
    "shareProcessNamespace": f"{POD}shareprocessnamespace",
    "initContainers": f"{POD}init-containers",
    "securityContext": f"{POD}securitycontext",
}
VOLUMES: Final = {
    "hostPath": ("HostPath", f"{POD}volumes-hostpath"),
    "csi": ("CSI", f"{POD}volumes-csi"),
    "image": ("Image", f"{POD}volumes-image"),
    "ephemeral": ("Ephemeral", f"{POD}volumes-ephemeral"),
    "emptyDir": ("EmptyDir", f"{POD}volumes-emptydir"),
}
CLAIM: Final = f"{POD}persistent-volume-claim"
CLAIM_WRITE: Final = f"{POD}persistent-volume-write"
RESERVED_PORTS: Final = (8008, 8012, 8013, 8022, 8112, 9090, 9091)
RESERVED_ENV: Final = ("PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION")
RESERVED_PATHS: Final = ("/", "/dev", "/dev/log", "/var", "/var/log")
POD_SECURITY: Final = (
    "runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "supplementalGroups", "seccompProfile",
)  # fmt: skip
PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE: Final = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?{PART}(?:/{PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[a-f0-9]{{64}})?"
)


class Rules:
    """The rules under some flags."""

    def __init__(self, features: dict[str, str]) -> None:
        self._features = DEFAULTS | features

    def enabled(self, flag: str) -> bool:
        return self._features.get(flag, "disabled").lower() == "enabled"

    def settable(self, flag: str) -> bool:
        return self._features.get(flag, "disabled").lower() != "disabled"

    def of_revision(self, spec: Json, path: str) -> Iterator[Fault]:
        yield from _within(spec, "timeoutSeconds", 600, path)
        yield from _within(spec, "containerConcurrency", 1000, path)
        yield from self._pod(spec, path)
        containers = spec.get("containers") or []
        if not containers:
            yield _missing(f"{path}.containers")
            return
        ports = [each.get("ports") or [] for each in containers]
        if sum(map(len, ports)) > 1:
            why = "Only a single port is allowed across all containers"
            yield "more than one container port is set", f"{path}.containers[*].ports", why
        elif len(containers) > 1 and not any(ports):
            yield _missing(f"{path}.containers[*].ports")
        else:
            yield from _port(ports, containers, path)
        yield from self._volumes(spec, path)
        names: set[str] = set()
        for index, each in enumerate(containers):
            at = f"{path}.containers[{index}]"
            if each.get("name") in names:
                yield f'duplicate container name "{each["name"]}"', f"{at}.name", ""
            names.add(each.get("name", ""))
            serving = len(containers) == 1 or bool(each.get("ports"))
            yield from self._container(each, spec, at, serving=serving)

    def _pod(self, spec: Json, path: str) -> Iterator[Fault]:
        for name, flag in FLAGGED.items():
            if name not in spec or name == "securityContext":
                continue
            if not self.settable(flag):
                yield _forbidden(f"{path}.{name}")
        found = spec.get("initContainers") or []
        if found and not self.enabled(FLAGGED["initContainers"]):
            yield f"pod spec support for init-containers is off, but found {len(found)} init containers", "", ""
        if "securityContext" in spec:
            allowed = POD_SECURITY if self.settable(FLAGGED["securityContext"]) else ()
            if not allowed:
                yield _forbidden(f"{path}.securityContext")
            for name in spec["securityContext"]:
                if name not in allowed:
                    yield _forbidden(f"{path}.securityContext.{name}")
        account = spec.get("serviceAccountName") or ""
        if account and not re.fullmatch(SUBDOMAIN, account):
            yield f"invalid value: {account}", f"{path}.serviceAccountName", SUBDOMAIN_RULE
        if spec.get("automountServiceAccountToken"):
            yield _forbidden(f"{path}.automountServiceAccountToken")

    def _volumes(self, spec: Json, path: str) -> Iterator[Fault]:
        mounted = {
            mount.get("name")
            for each in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
            for mount in each.get("volumeMounts") or []
        }
        for index, each in enumerate(spec.get("volumes") or []):
            at, name = f"{path}.volumes[{index}]", each.get("name", "")
            for source, (shown, flag) in VOLUMES.items():
                if source not in each:
                    continue
                if not self.enabled(flag):
                    yield f"{shown} volume support is disabled, but found {shown} volume {name}", "", ""
                if not self.settable(flag):
                    yield _forbidden(f"{at}.{source}")
            if "persistentVolumeClaim" in each:
                yield from self._claim(each, at)
            medium = (each.get("emptyDir") or {}).get("medium", "")
            if medium not in ("", "Memory"):
                yield f"invalid value: {medium}", f"{at}.emptyDir.medium", ""
            if name not in mounted:
                yield f'volume with name "{name}" not mounted', f"{at}.name", ""

    def _claim(self, volume: Json, at: str) -> Iterator[Fault]:
        claim = volume["persistentVolumeClaim"]
        found = f"found persistent volume claim {claim.get('claimName', '')}"
        if not self.enabled(CLAIM):
            yield f"Persistent volume claim support is disabled, but {found}", "", ""
        if not claim.get("readOnly") and not self.enabled(CLAIM_WRITE):
            yield f"Persistent volume write support is disabled, but {found} that is not read-only", "", ""
        if not self.settable(CLAIM):
            yield _forbidden(f"{at}.persistentVolumeClaim")

    def _container(self, container: Json, spec: Json, at: str, *, serving: bool) -> Iterator[Fault]:
        if container.get("name") == "queue-proxy":
            yield '"queue-proxy" is a reserved container name', f"{at}.name", ""
        image = container.get("image") or ""
        if not image:
            yield _missing(f"{at}.image")
        elif not IMAGE.fullmatch(image):
            why = f'image: "{image}", error: could not parse reference: {image}'
            yield "Failed to parse image reference", f"{at}.image", why
        for index, each in enumerate(container.get("env") or []):
            yield from self._env(each, f"{at}.env[{index}]")
        yield from self._security(container.get("securityContext") or {}, f"{at}.securityContext")
        policy = container.get("terminationMessagePolicy") or ""
        if policy not in ("", "File", "FallbackToLogsOnError"):
            yield f"invalid value: {policy}", f"{at}.terminationMessagePolicy", ""
        known = {each.get("name") for each in spec.get("volumes") or []}
        for index, each in enumerate(container.get("volumeMounts") or []):
            yield from self._mount(each, known, f"{at}.volumeMounts[{index}]")
        for name in ("readinessProbe", "livenessProbe", "startupProbe"):
            if name not in container:
                continue
            if not serving and not self.enabled("multi-container-probing"):
                yield _forbidden(f"{at}.{name}")
                for given in ("successThreshold", "periodSeconds", "timeoutSeconds", "failureThreshold"):
                    if container[name].get(given):
                        yield _forbidden(f"{at}.{name}.{given}")
            else:
                yield from _probe(container[name], container, f"{at}.{name}", ready=name == "readinessProbe")

    def _env(self, env: Json, at: str) -> Iterator[Fault]:
        name = env.get("name") or ""
        if not name:
            yield _missing(f"{at}.name")
        elif name in RESERVED_ENV:
            yield f'"{name}" is a reserved environment variable', f"{at}.name", ""
        for source in ("fieldRef", "resourceFieldRef"):
            if source in (env.get("valueFrom") or {}) and not self.settable(f"{POD}fieldref"):
                yield _forbidden(f"{at}.valueFrom.{source}")

    def _security(self, security: Json, at: str) -> Iterator[Fault]:
        if security.get("privileged"):
            yield _forbidden(f"{at}.privileged")
        added = (security.get("capabilities") or {}).get("add")
        if added and not self.enabled("kubernetes.containerspec-addcapabilities"):
            yield _forbidden(f"{at}.capabilities.add")
        for name in ("runAsUser", "runAsGroup"):
            yield from _within(security, name, INT32, at)

    def _mount(self, mount: Json, known: set[Any], at: str) -> Iterator[Fault]:
        if mount.get("name") not in known:
            yield "volumeMount has no matching volume", f"{at}.name", ""
        path = mount.get("mountPath") or ""
        if not path:
            yield _missing(f"{at}.mountPath")
        elif (path.rstrip("/") or "/") in RESERVED_PATHS:
            yield f'mountPath "{path}" is a reserved path', f"{at}.mountPath", ""
        elif not path.startswith("/"):
            yield f"invalid value: {path}", f"{at}.mountPath", ""
        flag = f"{POD}volumes-mount-propagation"
        if "mountPropagation" in mount:
            if not self.enabled(flag):
                found = f"found volume mount {mount.get('name', '')} with mount propagation"
                yield f"Volume Mount Propagation support is disabled, but {found}", "", ""
            if not self.settable(flag):
                yield _forbidden(f"{at}.mountPropagation")


def _missing(path: str) -> Fault:
    return "missing field(s)", path, ""


def _forbidden(path: str) -> Fault:
    return "must not set the field(s)", path, ""


def _within(obj: Json, name: str, most: int, path: str, least: int = 0) -> Iterator[Fault]:
    value = obj.get(name)
    if value is not None and not least <= value <= most:
        yield f"expected {least} <= {value} <= {most}", f"{path}.{name}", ""


def _port(ports: list[list[Json]], containers: list[Json], path: str) -> Iterator[Fault]:
    for index, listed in enumerate(ports):
        at = f"{path}.containers[{index}].ports"
        for each in listed:
            number, name, protocol = each.get("containerPort", 0), each.get("name", ""), each.get("protocol", "TCP")
            if number in RESERVED_PORTS:
                why = f"{number} is a reserved port, please use a different value"
                yield f"invalid value: {number} is a reserved port", f"{at}.containerPort", why
            yield from _within(each, "containerPort", 65535, at)
            if protocol != "TCP":
                yield f"invalid value: {protocol}", f"{at}.protocol", ""
            if name not in ("", "h2c", "http1"):
                yield f"Port name {name} is not allowed", at, "Name must be empty, or one of: 'h2c', 'http1'"


def _probe(probe: Json, container: Json, at: str, *, ready: bool) -> Iterator[Fault]:
    given = [name for name in HANDLERS if name in probe]
    if len(given) > 1:
        for name in given:
            yield "expected exactly one, got both", f"{at}.{name}", ""
    named = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
    if isinstance(named, str) and named not in [each.get("name") for each in container.get("ports") or []]:
        where = "httpGet" if "httpGet" in probe else "tcpSocket"
        yield f"invalid value: {named}", f"{at}.{where}.port", "Probe port must match container port"
    yield from _within(probe, "periodSeconds", INT32, at)
    if not ready:
        return
    yield from _within(probe, "successThreshold", INT32, at, least=1)
    if not probe.get("periodSeconds"):
        for without in ("failureThreshold", "timeoutSeconds"):
            if probe.get(without):
                yield f"{without} is disallowed when periodSeconds is zero", f"{at}.{without}", ""


def insecure(spec: Json, path: str) -> list[str]:
    """What would be another value if Kubernetes' defaults were secure."""
    pod = spec.get("securityContext") or {}
    found = []
    for listed in ("containers", "initContainers"):
        for index, each in enumerate(spec.get(listed) or []):
            security = each.get("securityContext") or {}
            names = ["allowPrivilegeEscalation"] if "allowPrivilegeEscalation" not in security else []
            if "capabilities" not in security:
                names.append("capabilities")
            elif not security["capabilities"].get("drop"):
                names.append("capabilities.drop")
            names += [name for name in ("runAsNonRoot", "seccompProfile") if name not in security and name not in pod]
            found += [f"{path}.{listed}[{index}].securityContext.{name}" for name in names]
    return found
