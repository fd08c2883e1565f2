"""Show in the label `kelvin.dev/role` which of the control plane's pods leads.

The control plane's Service selects `kelvin.dev/role=leader`, so requests reach the leader while every follower is
Ready. The Lease alone decides who leads (`leader_election.py`); the label follows it.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from controlplane import dependencies
from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ClusterError, Json, api_timeout
from controlplane.knative.policy.object_labels import ROLE
from kelvin.contracts.backoff import ExponentialBackoff, should_log

if TYPE_CHECKING:
    from controlplane.knative.apply.kubernetes_client import KubernetesCluster  # needs the extra `cluster`

LEADER: Final = "leader"
FOLLOWER: Final = "follower"
LABEL_POLL_S: Final = 5.0  # interval at which the leader looks for other pods with its label
BACKOFF: Final = ExponentialBackoff(0.5, 10.0)

log = logging.getLogger("kelvin.cluster")


class RoleLabel:
    """The role label of one control plane's own pod."""

    def __init__(
        self,
        cluster: "KubernetesCluster",
        namespace: str,
        pod: str,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._cluster, self._namespace, self._pod, self._clock, self._jitter = cluster, namespace, pod, clock, jitter
        self._failures = 0  # in a row

    def __repr__(self) -> str:
        return f"<RoleLabel {self._namespace}/{self._pod} failures={self._failures}>"

    async def follow(self) -> None:
        """Return once our pod is labelled as a follower. Retries until then."""
        while not await self._try_write(self._label_as_follower):
            await self._clock.sleep(BACKOFF.delay_s(self._failures, self._jitter()))

    async def lead(self) -> None:
        """Keep our pod the only one that is labelled as the leader. Runs until it is cancelled.

        A label can come back: a write that the previous leader sent may be done late, and people edit labels.
        """
        while True:
            done = await self._try_write(self._label_as_leader)
            await self._clock.sleep(LABEL_POLL_S if done else BACKOFF.delay_s(self._failures, self._jitter()))

    async def _label_as_follower(self) -> None:
        await self._label(self._pod, FOLLOWER)

    async def _label_as_leader(self) -> None:
        # Others first: the Service may lead to no pod for a moment, but never to two.
        labelled = await self._cluster.list_pods(self._namespace, f"{ROLE}={LEADER}")
        is_ours_labelled = False
        for pod in labelled:
            if pod["metadata"]["name"] == self._pod:
                is_ours_labelled = True
            else:
                await self._label(pod["metadata"]["name"], FOLLOWER, uid=pod["metadata"]["uid"])
        if not is_ours_labelled:
            await self._label(self._pod, LEADER)

    async def _label(self, pod: str, role: str, *, uid: str | None = None) -> None:
        # An apply creates what is missing. With a uid it is refused instead, if the pod has gone meanwhile.
        about: Json = {"name": pod, "namespace": self._namespace, "labels": {ROLE: role}}
        if uid is not None:
            about["uid"] = uid
        async with api_timeout(dependencies.LEASE.timeout_s):
            await self._cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about})
        log.info("pod %s is labelled %s=%s", pod, ROLE, role)

    async def _try_write(self, write: Callable[[], Awaitable[None]]) -> bool:
        """Run the write. Return whether it succeeded."""
        try:
            await write()
        except ClusterError as error:
            self._failures += 1
            if should_log(self._failures):
                log.warning("the label %s can't be written: %s", ROLE, error)
            return False
        self._failures = 0
        return True
