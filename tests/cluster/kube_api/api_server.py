"""A strict Kubernetes API server in this process, on a real port.

It imitates what the product, its tests and kubectl use of kube-apiserver 1.36.2 with Knative Serving's kinds and
webhooks. `test_recorded_answers.py` checks it against recorded exchanges with a real one:
- `objects`, `structural_schemas`: decoding, strict field validation, metadata, generations
- `field_ownership`, `field_sets`: server-side apply, conflicts, removal of fields
- `event_store`, `watches`: lists and their pages, watches, expiry
- `object_storage`, `deletions`, `garbage_collector`: preconditions, finalizers, propagation
- `knative_webhook`: defaults and refusals of Services

There is no kubelet, scheduler or Knative controller. Tests write what those would (`fake_knative.FakeKnative`).
"""

import asyncio
import base64
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml
from aiohttp import web

from coldstart_bench.harness.temporary_certificates import make_certificate
from tests.cluster.kube_api.deletions import Deletion, delete
from tests.cluster.kube_api.garbage_collector import collect
from tests.cluster.kube_api.http_frontend import Fault, HttpFrontend, RecordedRequest
from tests.cluster.kube_api.kinds import Kind, knative
from tests.cluster.kube_api.object_storage import ObjectStorage
from tests.cluster.kube_api.objects import Options
from tests.cluster.kube_api.status_answers import Json
from tests.loop_thread import HOST, running_loop_thread

NAMESPACES: Final = ("default", "kube-system", "knative-serving")


@dataclass(slots=True)
class ApiServer:
    """The running server. Its methods may be called from any thread."""

    url: str
    cluster: ObjectStorage
    front: HttpFrontend
    trusted: bytes = b""  # PEM of its certificate; empty without TLS
    features: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.features = self.cluster.webhook.features  # Knative's flags: config-features

    # -- objects

    def create(self, obj: Json, *, manager: str = "test") -> Json:
        """Create an object as an administrator, with its status if it has one."""
        kind, namespace = self.kind(obj), obj["metadata"].get("namespace", "")
        made = self.cluster.create(kind, namespace, obj, Options(manager)).body
        if kind.has_status and "status" in obj:
            made = self.set_status(made, obj["status"])
        return made

    def get(self, api_version: str, kind: str, name: str, namespace: str = "") -> Json:
        """Return an object. Raises Refused (404)."""
        return self.cluster.get(self.cluster.kinds.of(api_version, kind), namespace, name)

    def objects(self, api_version: str, kind: str, namespace: str | None = None) -> list[Json]:
        of = self.cluster.kinds.of(api_version, kind)
        said = {"apiVersion": api_version, "kind": kind}
        return [said | each for each in self.cluster.listed(of, namespace)["items"]]

    def set_status(self, obj: Json, status: Json, *, manager: str = "controller") -> Json:
        """Replace the whole status, as a controller does."""
        kind, metadata = self.kind(obj), obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        with self.cluster.lock:
            now = self.cluster.get(kind, namespace, name)
            sub = "status" if kind.has_status else ""
            return self.cluster.update(kind, namespace, name, now | {"status": status}, Options(manager), sub=sub).body

    def change(self, obj: Json, patch: Json, *, manager: str = "test") -> Json:
        """Change an object by a merge patch."""
        kind, metadata = self.kind(obj), obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        return self.cluster.patch(kind, namespace, name, patch, "merge-patch+json", Options(manager)).body

    def delete(self, obj: Json, policy: str = "Background") -> None:
        """Delete an object. Raises Refused (404)."""
        metadata = obj["metadata"]
        delete(self.cluster, self.kind(obj), metadata.get("namespace", ""), metadata["name"], Deletion(policy))

    def kind(self, obj: Json) -> Kind:
        return self.cluster.kinds.of(obj["apiVersion"], obj["kind"])

    def namespace(self, name: str) -> None:
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    # -- faults, watches and credentials

    @property
    def requests(self) -> list[RecordedRequest]:
        """Every request, in order."""
        return self.front.requests

    @property
    def open_watches(self) -> int:
        """The number of open watches."""
        return len(self.front.streams)

    def inject_faults(self, *faults: Fault) -> None:
        """Add faults. Each applies once, to the next request that matches."""
        with self.cluster.lock:
            self.front.faults.extend(faults)

    def drop_watches(self) -> None:
        """End every watch without a last chunk."""
        self.front.drop_streams()

    def bookmark(self) -> None:
        """Send a bookmark to every watch that takes bookmarks."""
        self.front.send_bookmarks()

    def expire(self, *, as_status: bool = False) -> None:
        """Make every resource version until now too old for a watch or for the next page of a list.

        A watch then gets 410 as an ERROR event, or as the HTTP status with `as_status`.
        """
        self.front.gone_as_status = as_status
        with self.cluster.lock:
            self.cluster.store.expire()

    def collect(self) -> None:
        """Run the garbage collector to its end."""
        collect(self.cluster)

    @contextmanager
    def no_collector(self) -> Iterator[None]:
        """Stop the automatic garbage collector. `collect` still works."""
        self.front.collecting = False
        try:
            yield
        finally:
            self.front.collecting = True
            self.front.awake()

    def service_account(self, directory: Path, namespace: str = "default") -> Path:
        """Write the files that a pod finds in /var/run/secrets/kubernetes.io/serviceaccount."""
        for name, text in (
            ("token", self.front.token.encode()),
            ("ca.crt", self.trusted),
            ("namespace", namespace.encode()),
        ):
            (directory / name).write_bytes(text)
        return directory

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """Write a kubeconfig for this server's administrator."""
        about = {"server": self.url}
        if self.trusted:
            about["certificate-authority-data"] = base64.b64encode(self.trusted).decode()
        context = {"cluster": "tests", "user": "admin", "namespace": namespace}
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": about}],
            "users": [{"name": "admin", "user": {"token": self.front.token}}],
            "contexts": [{"name": "tests", "context": context}],
            "current-context": "tests",
        }
        path.write_text(yaml.safe_dump(text))
        return path


def installed() -> ObjectStorage:
    """Return a cluster with a few namespaces and Knative Serving's CRDs."""
    cluster = ObjectStorage()
    for definition in knative():
        cluster.create(cluster.kinds.of("apiextensions.k8s.io/v1", "CustomResourceDefinition"), "", definition)
    spaces = cluster.kinds.of("v1", "Namespace")
    for name in NAMESPACES:
        cluster.create(spaces, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return cluster


@contextmanager
def serving(*, tls: Path | None = None) -> Iterator[ApiServer]:
    """Yield the server on a local port, on a loop in its own thread. `tls` is the folder for its key, None for plain
    HTTP.
    """
    front = HttpFrontend(installed())
    context: ssl.SSLContext | None = None
    trusted, host = b"", HOST
    if tls is not None:
        chain, key = make_certificate(tls / "api-server")
        context, trusted, host = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain.read_bytes(), "localhost"
        context.load_cert_chain(chain, key)

    async def main(stop: asyncio.Event) -> None:
        server = web.Server(front.answer, access_log=None, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=context).start()
            await front.run(stop)
        finally:
            front.drop_streams()
            await runner.cleanup()

    with socket.create_server((HOST, 0)) as listener, running_loop_thread(main):
        scheme = "https" if context else "http"
        yield ApiServer(f"{scheme}://{host}:{listener.getsockname()[1]}", front.cluster, front, trusted)


__all__ = ["ApiServer", "Fault", "serving"]
