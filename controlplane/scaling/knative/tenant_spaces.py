"""Watch the namespaces of tenants for what `policy/tenant_space` says that they need.

Namespaces and network policies are watched. Whether a secret is there is asked for by its name, since the control plane
may neither list secrets nor read one that pods of a version don't mount; of the answer only the status counts. What was
found once is not asked for again while the namespace is the same: pods say themselves that a secret has gone.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from contracts.traffic_errors import StartFailed
from controlplane.clock import Clock
from controlplane.policy import tenant_space as policy
from controlplane.policy.labels import Place
from controlplane.policy.tenant_space import Needs, Seen
from controlplane.scaling.knative.cluster import ClusterApi, ClusterError, Denied, Json, Ref
from controlplane.scaling.knative.following import follow
from service.first import first

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0  # until what was missing is looked for again


@dataclass(slots=True)
class _Probe:
    """What is known of the objects that can't be watched, for a namespace of this uid."""

    uid: str
    may_write: bool
    absent: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        return self.may_write and not self.absent


@dataclass(slots=True)
class _Space:
    uid: str
    labels: dict[str, str]


@dataclass(slots=True)
class _Policies:
    """Names of the network policies of one namespace."""

    closing: set[str] = field(default_factory=set)
    letting: set[str] = field(default_factory=set)


class TenantSpaces:
    """All namespaces that versions are to run in. `changed` is called whenever another answer may be given."""

    def __init__(self, api: ClusterApi, needs: Needs, clock: Clock, changed: Callable[[], None]) -> None:
        self._api, self._needs, self._clock, self._changed = api, needs, clock, changed
        self.synced = asyncio.Event()  # namespaces and policies were seen once
        self._looked = asyncio.Event()  # at something; replaced each time
        self._begin()

    def __repr__(self) -> str:
        return f"<TenantSpaces namespaces={len(self._spaces)} wanted={len(self._wanted)}>"

    def _begin(self) -> None:
        self.synced.clear()
        self._spaces: dict[str, _Space] = {}
        self._policies: dict[str, _Policies] = {}
        self._probes: dict[str, _Probe] = {}
        self._wanted: set[str] = set()  # namespaces that somebody asked about
        self._asked = asyncio.Event()

    def failure(self, namespace: str, tenant: str) -> StartFailed | None:
        """Return why nothing may start there; None where nothing is known to be missing."""
        lacking = self._gaps(namespace, tenant) if self.synced.is_set() else ()
        return policy.failure(namespace, tenant, lacking) if lacking else None

    def is_complete(self, namespace: str, tenant: str) -> bool:
        """Return whether it is known to hold all that it needs. The first call has it looked at."""
        if namespace not in self._wanted:
            self._wanted.add(namespace)
            self._asked.set()
        return self.synced.is_set() and self._is_probed(namespace) and not self._gaps(namespace, tenant)

    async def looked_at(self, namespace: str, tenant: str) -> None:
        """Return once it is known what the namespace holds. Wait no longer than the caller's timeout."""
        self.is_complete(namespace, tenant)
        while not (self.synced.is_set() and self._is_probed(namespace)):
            self._looked.clear()
            await self._looked.wait()

    def retain(self, namespaces: set[str]) -> None:
        """Forget who was asked about, except for these."""
        self._wanted &= namespaces

    def _is_probed(self, namespace: str) -> bool:
        space, probe = self._spaces.get(namespace), self._probes.get(namespace)
        return space is None or (probe is not None and probe.uid == space.uid)

    def _gaps(self, namespace: str, tenant: str) -> tuple[str, ...]:
        space = self._spaces.get(namespace)
        probe = self._probes.get(namespace) if self._is_probed(namespace) else None
        policies = self._policies.get(namespace, _Policies())
        seen = Seen(
            None if space is None else space.labels,
            bool(policies.closing),
            bool(policies.letting),
            probe is None or probe.may_write,
            () if probe is None else probe.absent,
        )
        return policy.gaps(tenant, self._needs, seen)

    async def run(self) -> None:
        """Until it is cancelled. Run again it begins with what there is."""
        self._begin()
        spaces, policies = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._api, "v1", "Namespace", "", self._space, spaces))
            tasks.create_task(follow(self._api, "networking.k8s.io/v1", "NetworkPolicy", "", self._policy, policies))
            for seen in (spaces, policies):
                await seen.wait()
            self.synced.set()
            self._tell()
            tasks.create_task(self._look())

    async def _look(self) -> None:
        """Ask for what can't be watched: at once for a namespace that is new, later again for what was missing."""
        while True:
            self._asked.clear()
            for namespace in sorted(self._wanted & self._spaces.keys()):
                space, probe = self._spaces[namespace], self._probes.get(namespace)
                if probe is None or probe.uid != space.uid or not probe.is_over:
                    await self._probe(namespace, space.uid)
            await first(self._asked.wait(), self._clock.sleep(AGAIN_S))

    async def _probe(self, namespace: str, uid: str) -> None:
        """A cluster that gives no answer leaves what was known."""
        absent, may_write = [], True
        named = [("Secret", "the secret", each) for each in self._needs.secrets]
        named += [("ConfigMap", "the config map", each) for each in self._needs.config_maps]
        for kind, what, name in named:
            try:
                if not await self._api.exists(Ref("v1", kind, namespace, name)):
                    absent.append(f"{what} {name}")
            except ClusterError as error:
                if not isinstance(error.trouble, Denied):
                    log.info("a namespace could not be looked at: %s", error, extra={"namespace": namespace})
                    return
                may_write = False
                break
        found = _Probe(uid, may_write, tuple(absent))
        if self._probes.get(namespace) != found:
            self._probes[namespace] = found
            self._tell()

    def _tell(self) -> None:
        self._looked.set()
        self._changed()

    def _space(self, place: Place, obj: Json | None) -> None:
        name = place[1]
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._spaces.pop(name, None)
            self._probes.pop(name, None)
        else:
            about = obj["metadata"]
            self._spaces[name] = _Space(str(about.get("uid", "")), about.get("labels") or {})
        if name in self._wanted:
            self._asked.set()
            self._tell()

    def _policy(self, place: Place, obj: Json | None) -> None:
        namespace, name = place
        of = self._policies.setdefault(namespace, _Policies())
        for names, holds in ((of.closing, policy.closes), (of.letting, policy.lets_runtimes_speak)):
            names.discard(name)
            if obj is not None and holds(obj):
                names.add(name)
        if not of.closing and not of.letting:
            del self._policies[namespace]
        if namespace in self._wanted:
            self._changed()
