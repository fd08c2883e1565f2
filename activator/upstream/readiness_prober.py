"""Probe pods that the cluster does not report as ready yet, and use each from its first correct response.

Knative's own activator does the same. It makes a pod usable some seconds earlier than its readiness, which goes through
the API server. Source: knative/serving, pkg/activator/net/revision_backends.go (98e5ef9).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from activator import dependencies
from activator.upstream.http1_client import Client
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow
from kelvin.ipc.connector import ConnectorFactory
from kelvin.process.loops import Loops
from kelvin.telemetry.policy.instruments import MetricsPage

log = logging.getLogger(__name__)

TIMEOUT_S: Final = dependencies.POD.timeout_s
MAX_CONCURRENT_PROBES: Final = 64  # concurrent probes
PATH: Final = "/healthz"
PROBE_TOKEN: Final = b"queue"  # sent and echoed: queue-proxy's name, which a runtime without one echoes, too
SHORTEST_PAUSE_S: Final = 0.025  # first pause between probes
LONGEST_PAUSE_S: Final = 1.0  # longest pause, so that the end of a start is noticed soon
PAUSE_FRACTION: Final = 0.02  # pause as a fraction of the probing time so far
PROBE_FIELDS: Final = (("k-network-probe", PROBE_TOKEN.decode()), ("user-agent", "Knative-Activator-Probe"))


def pause_s(probing_s: float) -> float:
    """Return the seconds until the next probe after `probing_s` of probing: a pod is used 2 % or 25 ms late at most."""
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, probing_s * PAUSE_FRACTION))


@dataclass(slots=True, eq=False)
class _Probe:
    """A pod that is being probed. Its row may change, its address does not."""

    row: ReplicaRow
    task: "asyncio.Task[None]" = field(init=False)


class ReadinessProber:
    """A filter between the feed and the throttler. Use from one event loop; `close` ends its probes. `publish_row` gets
    the row of a pod that has responded, as the feed would report a ready one.
    """

    def __init__(
        self, connector_factory: ConnectorFactory, publish_row: Callable[[ReplicaRow], None], page: MetricsPage
    ) -> None:
        self._connector_factory = connector_factory
        self._publish_row = publish_row
        self._loops = Loops()
        self._probes: dict[str, _Probe] = {}
        self._proven_addresses: dict[str, str] = {}  # pod -> address, if only our probe says that it is ready
        self._in_use: set[str] = set()  # these, and pods that the feed reports as ready
        self._probe_slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        page.gauge(
            "kelvin_pods_probed",
            "Pods that are probed before the cluster reports them ready.",
            lambda: len(self._probes),
        )

    def __repr__(self) -> str:
        counts = f"asking={len(self._probes)} proven={len(self._proven_addresses)} used={len(self._in_use)}"
        return f"<ReadinessProber {counts}>"

    def filter_feed(self, feed: Feed) -> Feed:
        """Return the feed message without pods that must be probed first, and with pods that have responded."""
        present = {row.runtime_id for row in feed.replicas}
        gone = (self._probes.keys() | self._in_use) - present if feed.full else set()
        for runtime_id in (*gone, *feed.removed_replicas):
            self._forget(runtime_id)
        rows, unready = [], []
        for row in feed.replicas:
            name = row.runtime_id
            if row.unproven and not row.draining and self._proven_addresses.get(name) != row.address:
                if name in self._in_use:
                    unready.append(name)
                self._start_probe(row)
            elif not row.unproven or name in self._in_use:
                if not row.unproven:
                    self._forget(name)
                self._in_use.add(name)
                rows.append(msgspec.structs.replace(row, unproven=False) if row.unproven else row)
            else:
                self._forget(name)  # it is removed before it ever responded
        if len(rows) == len(feed.replicas) and not any(row.unproven for row in feed.replicas):
            return feed
        removed = (*feed.removed_replicas, *unready)
        return msgspec.structs.replace(feed, replicas=tuple(rows), removed_replicas=removed)

    async def close(self) -> None:
        """Cancel all probes and wait for them."""
        for name in list(self._probes):
            self._forget(name)
        await self._loops.close()

    def check_integrity(self) -> None:
        """Assert that no pod in use is probed, and that every proven pod is in use."""
        assert not self._probes.keys() & self._in_use
        assert self._proven_addresses.keys() <= self._in_use
        assert all(pod_probe.row.unproven for pod_probe in self._probes.values())

    def _forget(self, name: str) -> None:
        self._in_use.discard(name)
        self._proven_addresses.pop(name, None)
        if (pod_probe := self._probes.pop(name, None)) is not None:
            pod_probe.task.cancel()

    def _start_probe(self, row: ReplicaRow) -> None:
        pod_probe = self._probes.get(row.runtime_id)
        if pod_probe is not None and pod_probe.row.address == row.address:
            pod_probe.row = row
            return
        self._forget(row.runtime_id)
        pod_probe = self._probes[row.runtime_id] = _Probe(row)
        body = partial(self._probe_until_ready, pod_probe)
        pod_probe.task = self._loops.start("pod probe", body, about=row.runtime_id, takes_readiness=False)

    async def _probe_until_ready(self, pod_probe: _Probe) -> None:
        name, began_s = pod_probe.row.runtime_id, time.monotonic()
        try:
            client = Client(self._connector_factory.connector_to(pod_probe.row.address, Role.RUNTIME))
            try:
                while True:
                    if await self._is_ready(client):
                        break
                    await asyncio.sleep(pause_s(time.monotonic() - began_s))
            finally:
                client.close()
        except ValueError as error:
            log.error("a pod can't be reached", extra={"runtime_id": name, "error": str(error)})
            del self._probes[name]
            return
        del self._probes[name]
        log.info(
            "a pod takes requests", extra={"runtime_id": name, "asked_ms": round((time.monotonic() - began_s) * 1000)}
        )
        self._proven_addresses[name] = pod_probe.row.address
        self._in_use.add(name)
        self._publish_row(msgspec.structs.replace(pod_probe.row, unproven=False))

    async def _is_ready(self, client: Client) -> bool:
        async with self._probe_slots:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    response = await client.request("GET", PATH, fields=PROBE_FIELDS)
                    try:
                        body = b""
                        while len(body) <= len(PROBE_TOKEN) and (part := await response.read_part()):
                            body += part
                    finally:
                        response.release()
            except OSError:  # TimeoutError is one
                return False
        return response.status == 200 and body == PROBE_TOKEN
