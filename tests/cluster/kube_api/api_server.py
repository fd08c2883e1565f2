"""A strict Kubernetes API server in this process, on a real port: for tests of whoever speaks to one.

It imitates what the product, its tests and kubectl ask of a kube-apiserver 1.36.2 with Knative Serving's kinds and
webhooks. `test_recorded_answers.py` holds it to recorded exchanges with a real one:
- `objects`, `schemas`: decoding, strict field validation, metadata, generations
- `ownership`, `fields`: server-side apply, conflicts, removal of what is no longer applied
- `store`, `watches`: lists and their pages, watches, expiry
- `cluster`, `deletions`, `collector`: preconditions, finalizers, propagation
- `knative_webhook`: defaults and refusals of Services
There is no kubelet, scheduler or controller of Knative: what those write, a test writes itself (`playing.FakeKnative`).
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
from tests.cluster.kube_api.http_frontend import Fault, HttpFrontend, SeenRequest
from tests.cluster.kube_api.kinds import Kind, knative
from tests.cluster.kube_api.object_storage import ObjectStorage
from tests.cluster.kube_api.objects import Options
from tests.cluster.kube_api.status_answers import Json
from tests.loop_thread import HOST, running_loop_thread

NAMESPACES: Final = ("default", "kube-system", "knative-serving")


@dataclass(slots=True)
class ApiServer:
    """The server while its block runs. Its methods may be called from any thread."""

    url: str
    cluster: ObjectStorage
    front: HttpFrontend
    trusted: bytes = b""  # the PEM of its certificate, where it speaks TLS
    features: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.features = self.cluster.webhook.features  # Knative's flags: config-features

    # -- what is there

    def create(self, obj: Json, *, manager: str = "test") -> Json:
        """As an administrator creates it; with its status, if it has one."""
        kind, namespace = self.kind(obj), obj["metadata"].get("namespace", "")
        made = self.cluster.create(kind, namespace, obj, Options(manager)).body
        if kind.has_status and "status" in obj:
            made = self.set_status(made, obj["status"])
        return made

    def get(self, api_version: str, kind: str, name: str, namespace: str = "") -> Json:
        """Raises Refused (404)."""
        return self.cluster.get(self.cluster.kinds.of(api_version, kind), namespace, name)

    def objects(self, api_version: str, kind: str, namespace: str | None = None) -> list[Json]:
        of = self.cluster.kinds.of(api_version, kind)
        said = {"apiVersion": api_version, "kind": kind}
        return [said | each for each in self.cluster.listed(of, namespace)["items"]]

    def set_status(self, obj: Json, status: Json, *, manager: str = "controller") -> Json:
        """The whole status, as a controller writes it."""
        kind, metadata = self.kind(obj), obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        with self.cluster.lock:
            now = self.cluster.get(kind, namespace, name)
            sub = "status" if kind.has_status else ""
            return self.cluster.update(kind, namespace, name, now | {"status": status}, Options(manager), sub=sub).body

    def change(self, obj: Json, patch: Json, *, manager: str = "test") -> Json:
        """By a merge patch."""
        kind, metadata = self.kind(obj), obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        return self.cluster.patch(kind, namespace, name, patch, "merge-patch+json", Options(manager)).body

    def delete(self, obj: Json, policy: str = "Background") -> None:
        """Raises Refused (404)."""
        metadata = obj["metadata"]
        delete(self.cluster, self.kind(obj), metadata.get("namespace", ""), metadata["name"], Deletion(policy))

    def kind(self, obj: Json) -> Kind:
        return self.cluster.kinds.of(obj["apiVersion"], obj["kind"])

    def namespace(self, name: str) -> None:
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    # -- what befalls its clients

    @property
    def seen(self) -> list[SeenRequest]:
        """Every request, in the order in which they came."""
        return self.front.seen

    @property
    def watching(self) -> int:
        """How many watches are open."""
        return len(self.front.streams)

    def fail(self, *faults: Fault) -> None:
        """What befalls the next requests that match, each once."""
        with self.cluster.lock:
            self.front.faults.extend(faults)

    def drop_watches(self) -> None:
        """Every watch ends, without a last chunk."""
        self.front.cut()

    def bookmark(self) -> None:
        """Every watch that takes bookmarks is sent one."""
        self.front.book()

    def expire(self, *, as_status: bool = False) -> None:
        """Every resource version until now is too old to watch or to go on listing from.

        A watch is then told 410 by an ERROR event, or with `as_status` by the status of HTTP.
        """
        self.front.gone_as_status = as_status
        with self.cluster.lock:
            self.cluster.store.expire()

    def collect(self) -> None:
        """The garbage collector, now, and not before this returns."""
        collect(self.cluster)

    @contextmanager
    def no_collector(self) -> Iterator[None]:
        """The garbage collector does nothing but what `collect` asks for."""
        self.front.collecting = False
        try:
            yield
        finally:
            self.front.collecting = True
            self.front.awake()

    def service_account(self, directory: Path, namespace: str = "default") -> Path:
        """What a pod finds in /var/run/secrets/kubernetes.io/serviceaccount, written there."""
        for name, text in (
            ("token", self.front.token.encode()),
            ("ca.crt", self.trusted),
            ("namespace", namespace.encode()),
        ):
            (directory / name).write_bytes(text)
        return directory

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """Written there, for this server and its administrator."""
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
    """A cluster with a few namespaces, and Knative Serving's definitions."""
    cluster = ObjectStorage()
    for definition in knative():
        cluster.create(cluster.kinds.of("apiextensions.k8s.io/v1", "CustomResourceDefinition"), "", definition)
    spaces = cluster.kinds.of("v1", "Namespace")
    for name in NAMESPACES:
        cluster.create(spaces, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return cluster


@contextmanager
def serving(*, tls: Path | None = None) -> Iterator[ApiServer]:
    """The server on a port of this machine, on a loop in a thread of its own; with TLS if `tls`, where its key lies."""
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
            front.cut()
            await runner.cleanup()

    with socket.create_server((HOST, 0)) as listener, running_loop_thread(main):
        scheme = "https" if context else "http"
        yield ApiServer(f"{scheme}://{host}:{listener.getsockname()[1]}", front.cluster, front, trusted)


__all__ = ["ApiServer", "Fault", "serving"]
