"""Watch whether tenants' namespaces hold everything that `knative/policy/namespace_requirements.py` requires.

Namespaces and network policies are watched. Secrets and config maps are probed by name, because the control plane may
not list them; only the status of the response counts. A complete namespace is not probed again: if a secret is deleted
later, the pods that mount it report that.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ClusterApi, ClusterError, Denied, Json, Ref
from controlplane.knative.apply.object_cache import follow
from controlplane.knative.policy import namespace_requirements as policy
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements, ObservedNamespace
from controlplane.knative.policy.object_labels import NamespacedName
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.process.race import first_completed

log = logging.getLogger(__name__)

PROBE_AGAIN_S: Final = 5.0  # while something is missing


@dataclass(slots=True)
class _Probe:
    """The result of probing the namespace with this uid."""

    uid: str
    may_write: bool
    absent: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        return self.may_write and not self.absent


@dataclass(slots=True)
class _Namespace:
    uid: str
    labels: dict[str, str]


@dataclass(slots=True)
class _Policies:
    """Network policies of one namespace, by name."""

    denying: set[str] = field(default_factory=set)
    opening: set[str] = field(default_factory=set)


class TenantNamespaces:
    """All namespaces in which versions should run. Calls `on_changed` when an answer may have changed."""

    def __init__(
        self, api: ClusterApi, requirements: NamespaceRequirements, clock: Clock, on_changed: Callable[[], None]
    ) -> None:
        self._api, self._requirements, self._clock, self._on_changed = api, requirements, clock, on_changed
        self.synced = asyncio.Event()  # namespaces and policies were listed
        self._learned = asyncio.Event()  # set after each new fact
        self._begin()

    def __repr__(self) -> str:
        return f"<TenantNamespaces namespaces={len(self._namespaces)} wanted={len(self._wanted)}>"

    def _begin(self) -> None:
        self.synced.clear()
        self._namespaces: dict[str, _Namespace] = {}
        self._policies: dict[str, _Policies] = {}
        self._probes: dict[str, _Probe] = {}
        self._wanted: set[str] = set()  # namespaces that were asked about
        self._probe_due = asyncio.Event()

    def failure(self, namespace: str, tenant: str) -> StartFailed | None:
        """Return why nothing can start there; None if nothing is known to be missing."""
        lacking = self._find_missing(namespace, tenant) if self.synced.is_set() else ()
        return policy.missing_failure(namespace, tenant, lacking) if lacking else None

    def is_complete(self, namespace: str, tenant: str) -> bool:
        """Return whether the namespace is known to hold all requirements. The first call starts to probe it."""
        if namespace not in self._wanted:
            self._wanted.add(namespace)
            self._probe_due.set()
        return self.synced.is_set() and self._has_current_probe(namespace) and not self._find_missing(namespace, tenant)

    async def wait_until_known(self, namespace: str, tenant: str) -> None:
        """Return once the contents of the namespace are known. Use it with a timeout."""
        self.is_complete(namespace, tenant)
        while not (self.synced.is_set() and self._has_current_probe(namespace)):
            self._learned.clear()
            await self._learned.wait()
            self.is_complete(namespace, tenant)

    def retain(self, namespaces: set[str]) -> None:
        """Stop probing other namespaces than these. Callers that wait for one ask for it again."""
        if not self._wanted <= namespaces:
            self._wanted &= namespaces
            self._learned.set()

    def _has_current_probe(self, namespace: str) -> bool:
        space, probe = self._namespaces.get(namespace), self._probes.get(namespace)
        return space is None or (probe is not None and probe.uid == space.uid)

    def _find_missing(self, namespace: str, tenant: str) -> tuple[str, ...]:
        known = self._namespaces.get(namespace)
        probe = self._probes.get(namespace) if self._has_current_probe(namespace) else None
        policies = self._policies.get(namespace, _Policies())
        observed = ObservedNamespace(
            labels=None if known is None else known.labels,
            denies_all=bool(policies.denying),
            opens_replicas=bool(policies.opening),
            may_write=probe is None or probe.may_write,
            absent=() if probe is None else probe.absent,
        )
        return policy.find_missing(tenant, self._requirements, observed)

    async def run(self) -> None:
        """Watch until cancelled. A later run starts from scratch."""
        self._begin()
        namespaces_listed, policies_listed = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._api, "v1", "Namespace", "", self._update_namespace, namespaces_listed))
            tasks.create_task(
                follow(self._api, "networking.k8s.io/v1", "NetworkPolicy", "", self._update_policy, policies_listed)
            )
            for listed in (namespaces_listed, policies_listed):
                await listed.wait()
            self.synced.set()
            self._notify()
            tasks.create_task(self._probe_forever())

    async def _probe_forever(self) -> None:
        """Probe new namespaces at once, and incomplete ones again."""
        while True:
            self._probe_due.clear()
            for namespace in sorted(self._wanted & self._namespaces.keys()):
                space, probe = self._namespaces.get(namespace), self._probes.get(namespace)
                if space is None:
                    continue  # it was deleted while another one was probed
                if probe is None or probe.uid != space.uid or not probe.is_complete:
                    await self._probe(namespace, space.uid)
            await first_completed(self._probe_due.wait(), self._clock.sleep(PROBE_AGAIN_S))

    async def _probe(self, namespace: str, uid: str) -> None:
        """Probe one namespace. If the cluster does not answer, keep the last result."""
        absent, may_write = [], True
        objects = [("Secret", "the secret", each) for each in self._requirements.secrets]
        objects += [("ConfigMap", "the config map", each) for each in self._requirements.config_maps]
        for kind, what, name in objects:
            try:
                if not await self._api.exists(Ref("v1", kind, namespace, name)):
                    absent.append(f"{what} {name}")
            except ClusterError as error:
                if not isinstance(error.api_failure, Denied):
                    log.info("a namespace could not be looked at: %s", error, extra={"namespace": namespace})
                    return
                may_write = False
                break
        found = _Probe(uid, may_write, tuple(absent))
        if self._probes.get(namespace) != found:
            self._probes[namespace] = found
            self._notify()

    def _notify(self) -> None:
        self._learned.set()
        self._on_changed()

    def _update_namespace(self, object_name: NamespacedName, obj: Json | None) -> None:
        name = object_name[1]
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._namespaces.pop(name, None)
            self._probes.pop(name, None)
        else:
            metadata = obj["metadata"]
            labels = metadata.get("labels")
            # Labels that can't be read count as none, so nothing starts there.
            labels = labels if isinstance(labels, dict) else {}
            self._namespaces[name] = _Namespace(str(metadata.get("uid", "")), labels)
        if name in self._wanted:
            self._probe_due.set()
            self._notify()

    def _update_policy(self, object_name: NamespacedName, obj: Json | None) -> None:
        namespace, name = object_name
        known = self._policies.setdefault(namespace, _Policies())
        for names, matches in ((known.denying, policy.denies_all), (known.opening, policy.opens_replicas)):
            names.discard(name)
            if obj is not None and matches(obj):
                names.add(name)
        if not known.denying and not known.opening:
            del self._policies[namespace]
        if namespace in self._wanted:
            self._on_changed()
