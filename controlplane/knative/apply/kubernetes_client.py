"""Implements `cluster.ClusterApi` and `Leases` with the `kubernetes` library."""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from controlplane import dependencies
from controlplane.clock import Clock, SystemClock
from controlplane.knative.apply.cluster import (
    Change,
    ClusterError,
    FieldConflict,
    Json,
    Missing,
    Ref,
    WriteConflict,
    api_timeout,
    collection_path,
)
from controlplane.knative.apply.events import EventRecorder
from controlplane.knative.apply.list_watch import ListWatch
from controlplane.knative.apply.transport import LoadConfiguration, Transport
from controlplane.knative.policy.object_labels import MANAGER

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
APPLY: Final = "application/apply-patch+yaml"
METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"  # without the contents of a secret
CONFLICT_TRIES: Final = 3  # for an apply that conflicts with another write
_LOG = logging.getLogger("kelvin.cluster")


class KubernetesCluster:
    """A cluster's API server. Implements `ClusterApi` and `Leases`."""

    def __init__(self, transport: Transport, clock: Clock, *, luck: Callable[[], float] = random.random) -> None:
        self._transport, self._clock, self._luck = transport, clock, luck
        self._events = EventRecorder(transport, clock)

    def __repr__(self) -> str:
        return f"<KubernetesCluster {self._transport}>"

    async def apply(self, obj: Json) -> Json:
        async with api_timeout(dependencies.CLUSTER.timeout_s):
            return await self._apply(obj, Ref.of(obj).path)

    async def apply_status(self, obj: Json) -> Json:
        head = {key: obj["metadata"][key] for key in ("name", "namespace") if key in obj["metadata"]}
        status_patch = {**{key: obj[key] for key in ("apiVersion", "kind", "status")}, "metadata": head}
        async with api_timeout(dependencies.CLUSTER.timeout_s):
            return await self._apply(status_patch, f"{Ref.of(obj).path}/status")

    async def _apply(self, obj: Json, path: str) -> Json:
        try:
            return await self._patch(obj, path, force=False)
        except ClusterError as error:
            if not isinstance(error.api_failure, FieldConflict):
                raise
            _LOG.warning("%s was changed by others, and is put right: %s", Ref.of(obj), error.api_failure.message)
            return await self._patch(obj, path, force=True)

    async def _patch(self, obj: Json, path: str, *, force: bool) -> Json:
        query = [("fieldManager", MANAGER), ("force", str(force).lower()), ("fieldValidation", "Strict")]
        limit_s = dependencies.CLUSTER.timeout_s
        for left in reversed(range(CONFLICT_TRIES)):
            try:
                return await self._transport.send_request(
                    "PATCH", path, query, obj, limit_s=limit_s, content_type=APPLY
                )
            except ClusterError as error:
                if not left or type(error.api_failure) is not WriteConflict:
                    raise
                await self._clock.sleep(0.05 * (1 + self._luck()))
        raise AssertionError

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._transport.send_request(
                "DELETE", ref.path, None, options, limit_s=dependencies.CLUSTER.timeout_s
            )
        except ClusterError as error:
            if not isinstance(error.api_failure, Missing):
                raise

    def watch(self, api_version: str, kind: str, *, labels: str = "") -> AsyncGenerator[Change, None]:
        return ListWatch(self._transport, api_version, kind, self._clock, labels=labels, luck=self._luck).changes()

    async def exists(self, ref: Ref) -> bool:
        try:
            await self._transport.send_request("GET", ref.path, limit_s=dependencies.CLUSTER.timeout_s, accept=METADATA)
        except ClusterError as error:
            if isinstance(error.api_failure, Missing):
                return False
            raise
        return True

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        await self._events.record(about, reason, message, warning=warning)

    async def read(self, ref: Ref) -> Json | None:
        """Return the object; None if it does not exist. Raises ClusterError."""
        try:
            return await self._transport.send_request("GET", ref.path, limit_s=dependencies.LEASE.timeout_s)
        except ClusterError as error:
            if isinstance(error.api_failure, Missing):
                return None
            raise

    async def list_pods(self, namespace: str, labels: str) -> tuple[Json, ...]:
        """Return the pods of a namespace that have these labels. Raises ClusterError."""
        path, query = collection_path("v1", "Pod", namespace), [("labelSelector", labels)]
        return tuple(
            (await self._transport.send_request("GET", path, query, limit_s=dependencies.LEASE.timeout_s))["items"]
        )

    async def create(self, obj: Json) -> Json:
        """Create the object. Raises ClusterError: WriteConflict if it exists already."""
        ref = Ref.of(obj)
        path = collection_path(ref.api_version, ref.kind, ref.namespace)
        query = [("fieldManager", MANAGER)]
        return await self._transport.send_request("POST", path, query, obj, limit_s=dependencies.LEASE.timeout_s)

    async def replace(self, obj: Json) -> Json:
        """Replace the version of the object that `obj` names. Raises ClusterError: WriteConflict for an old one."""
        query = [("fieldManager", MANAGER)]
        return await self._transport.send_request(
            "PUT", Ref.of(obj).path, query, obj, limit_s=dependencies.LEASE.timeout_s
        )


def kubeconfig(file: Path) -> LoadConfiguration:
    """Return a loader of address and credentials from a kubeconfig file, in its current context."""

    async def load(configuration: Configuration) -> None:
        await load_kube_config(config_file=str(file), client_configuration=configuration, persist_config=False)

    return load


def service_account_loader(account: Path = SERVICE_ACCOUNT, address: dict[str, str] | None = None) -> LoadConfiguration:
    """Return a loader of this pod's service account. Tokens change within the hour, so it reads them each minute."""

    async def load(configuration: Configuration) -> None:
        environment = {} if address is None else {"environ": address}  # environment variables that every pod has
        loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), **environment)
        loader.load_and_set(configuration)

    return load


@asynccontextmanager
async def open_cluster(load: LoadConfiguration, clock: Clock | None = None) -> AsyncIterator[KubernetesCluster]:
    """Open a cluster for the block. Raises ClusterError without a configuration. Does not check that it answers."""
    transport = Transport(load)
    try:
        await transport.connect()
        yield KubernetesCluster(transport, clock or SystemClock())
    finally:
        await transport.close()
