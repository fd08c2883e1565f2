"""Knative's controllers, Deployments and kubelets, played on the tests' API server.

A Service gets its Configuration, Route, Revision, Deployment, PodAutoscaler, ServerlessService, private Service with
its EndpointSlice, and pods, with the conditions and in the order of knative-recorded/lifecycle. The test is the
autoscaler (`scale`) and decides which pods start and when (`hold`, `start`, `fail`).

Left out: public Services, Endpoints, ReplicaSets (a pod belongs to its Deployment), Metrics, Ingresses, traffic to more
than the latest Revision, garbage collection of old Revisions.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.cluster import knative_children as children
from tests.cluster import knative_status as statuses
from tests.cluster.answers import Json, Refused
from tests.cluster.api_server import ApiServer
from tests.cluster.knative_children import AUTOSCALING, NETWORKING, SERVING, V1, is_ready
from tests.cluster.knative_status import Failure
from tests.cluster.objects import now

ROUNDS: Final = 200
LIMIT_S: Final = 30.0
CONTROLLER: Final = "knative-controller"
DOMAIN: Final = "example.test"


def ending(obj: Json) -> bool:
    return bool(obj["metadata"].get("deletionTimestamp"))


def address(index: int) -> str:
    """Of the pod of that number: each has one of its own on this machine, where a test may listen."""
    return f"127.{77 + index // 65025}.{index // 255 % 255}.{index % 255 + 1}"


class Knative:
    """Nothing happens but in `settle`, or while `running`."""

    def __init__(self, server: ApiServer, *, ports: Json | None = None, domain: str = DOMAIN) -> None:
        self._server = server
        self._ports = children.QUEUE_PORTS | (ports or {})
        self._domain = domain
        self._numbers = itertools.count()
        self._scales: dict[str, int] = {}
        self._failures: dict[str, Failure] = {}
        self._held: set[str] = set()
        self._changed = threading.Condition()
        self._changes = 0
        self._lock = threading.RLock()

    # -- the test's part

    def scale(self, revision: str, replicas: int) -> None:
        """As the autoscaler decides."""
        with self._lock:
            self._scales[revision] = replicas
        self._tell()

    def hold(self, revision: str) -> None:
        """Pods of this Revision get an address, but are not ready until `start`."""
        with self._lock:
            self._held.add(revision)

    def start(self, revision: str) -> None:
        with self._lock:
            self._held.discard(revision)
        self._tell()

    def fail(self, revision: str, failure: Failure) -> None:
        """Its pods never get ready, and the controllers say why."""
        with self._lock:
            self._failures[revision] = failure
            self._held.add(revision)
        self._tell()

    def pods(self, revision: str) -> list[Json]:
        found = self._server.objects("v1", "Pod")
        return [each for each in found if each["metadata"]["labels"].get(f"{SERVING}/revision") == revision]

    # -- the controllers' part

    def settle(self) -> None:
        """Until nothing is left to do."""
        with self._lock:
            for _ in range(ROUNDS):
                version = self._server.cluster.store.version
                self._round()
                self._server.collect()
                if self._server.cluster.store.version == version:
                    return
            raise AssertionError("the controllers go round in circles")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whenever something changes, what follows from it happens."""
        store, stopped = self._server.cluster.store, threading.Event()

        def run() -> None:
            seen = -1
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._changes != seen or stopped.is_set())  # noqa: B023
                    seen = self._changes
                if stopped.is_set():
                    return
                self.settle()

        thread = threading.Thread(target=run, name="knative")
        store.changed.append(self._tell)
        self._tell()
        thread.start()
        try:
            yield
        finally:
            store.changed.remove(self._tell)
            stopped.set()
            self._tell()
            thread.join(LIMIT_S)

    def wait(self, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Until something is so, looked at after each change; False if it takes longer."""
        ends_at = time.monotonic() + limit_s
        while True:
            with self._changed:
                seen = self._changes
            if reached():  # it may lock the store, which tells us under its lock
                return True
            with self._changed:
                if not self._changed.wait_for(lambda: self._changes != seen, ends_at - time.monotonic()):  # noqa: B023
                    return reached()

    def _tell(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _round(self) -> None:
        steps: tuple[tuple[str, str, Callable[[Json], None]], ...] = (
            (V1, "Service", self._service),
            (V1, "Configuration", self._configuration),
            (V1, "Revision", self._revision),
            (V1, "Route", self._route),
            (AUTOSCALING, "PodAutoscaler", self._autoscaler),
            (f"{NETWORKING}/v1alpha1", "ServerlessService", self._serverless_service),
            ("v1", "Service", self._private_service),
            ("apps/v1", "Deployment", self._deployment),
            ("v1", "Pod", self._pod),
        )
        for api_version, kind, step in steps:
            for each in self._server.objects(api_version, kind):
                try:
                    step(each)
                except Refused as error:
                    if error.status not in (404, 409):  # somebody was quicker; the next round sees it
                        raise

    def _find(self, api_version: str, kind: str, name: str, namespace: str) -> Json | None:
        try:
            return self._server.get(api_version, kind, name, namespace)
        except Refused:
            return None

    def _ensure(self, wanted: Json, *fields: str) -> Json:
        """That object, with these fields of its."""
        metadata = wanted["metadata"]
        found = self._find(wanted["apiVersion"], wanted["kind"], metadata["name"], metadata["namespace"])
        if found is None:
            return self._server.create(wanted, manager=CONTROLLER)
        if changed := {name: wanted[name] for name in fields if found.get(name) != wanted[name]}:
            return self._server.change(found, changed, manager=CONTROLLER)
        return found

    def _report(self, obj: Json, status: Json) -> None:
        if obj.get("status") != status:
            self._server.set_status(obj, status, manager=CONTROLLER)

    def _service(self, service: Json) -> None:
        metadata = service["metadata"]
        where = (metadata["name"], metadata["namespace"])
        configuration, route = self._find(V1, "Configuration", *where), self._find(V1, "Route", *where)
        if not ending(service):
            configuration = self._ensure(children.configuration(service), "spec")
            route = self._ensure(children.route(service))
            self._report(service, statuses.of_service(service, configuration, route, now()))

    def _configuration(self, configuration: Json) -> None:
        if ending(configuration):
            return
        revision = self._ensure(children.revision(configuration))
        self._report(configuration, statuses.of_configuration(configuration, revision, now()))

    def _route(self, route: Json) -> None:
        metadata = route["metadata"]
        if ending(route):
            left = [each for each in metadata["finalizers"] if each != "routes.serving.knative.dev"]
            if left != metadata["finalizers"]:
                self._server.change(route, {"metadata": {"finalizers": left or None}}, manager=CONTROLLER)
            return
        configuration = self._find(V1, "Configuration", metadata["name"], metadata["namespace"])
        self._report(route, statuses.of_route(route, configuration, now(), self._domain))

    def _revision(self, revision: Json) -> None:
        metadata = revision["metadata"]
        if ending(revision):
            return
        name, namespace = metadata["name"], metadata["namespace"]
        autoscaler = self._find(AUTOSCALING, "PodAutoscaler", name, namespace)
        ready = self._ready(name, namespace)
        self._report(revision, statuses.of_revision(revision, autoscaler, ready, self._failures.get(name), now()))
        if revision.get("status"):  # its image was resolved
            self._ensure(children.deployment(revision, 1))
            self._ensure(children.autoscaler(revision))

    def _autoscaler(self, autoscaler: Json) -> None:
        metadata = autoscaler["metadata"]
        if ending(autoscaler):
            return
        name, namespace = metadata["name"], metadata["namespace"]
        sks = self._ensure(children.serverless_service(autoscaler))
        private = self._find("v1", "Service", f"{name}-private", namespace)
        wanted, ready = self._scales.get(name, -1), self._ready(name, namespace)
        self._report(autoscaler, statuses.of_autoscaler(autoscaler, private, sks, wanted, ready, now()))
        deployment = self._find("apps/v1", "Deployment", f"{name}-deployment", namespace)
        if deployment is not None and wanted >= 0 and deployment["spec"]["replicas"] != wanted:
            self._server.change(deployment, {"spec": {"replicas": wanted}}, manager="autoscaler")

    def _serverless_service(self, sks: Json) -> None:
        metadata = sks["metadata"]
        if not ending(sks):
            self._ensure(children.private_service(sks))
            ready = self._ready(metadata["name"], metadata["namespace"])
            self._report(sks, statuses.of_serverless_service(sks, ready, now()))

    def _private_service(self, service: Json) -> None:
        metadata = service["metadata"]
        if (metadata.get("labels") or {}).get(children.TYPE) != "Private" or ending(service):
            return
        pods = self._of(metadata["labels"][f"{SERVING}/revision"], metadata["namespace"])
        there = [each for each in pods if (each.get("status") or {}).get("podIP")]
        self._ensure(children.endpoint_slice(service, there, self._ports), "endpoints", "ports")

    def _deployment(self, deployment: Json) -> None:
        metadata = deployment["metadata"]
        if ending(deployment):
            return
        revision = metadata["labels"][f"{SERVING}/revision"]
        pods = [
            each for each in self._of(revision, metadata["namespace"]) if not each["metadata"].get("deletionTimestamp")
        ]
        wanted = deployment["spec"]["replicas"]
        for _ in range(wanted - len(pods)):
            name = f"{metadata['name']}-{next(self._numbers):05d}"
            self._server.create(children.pod(deployment, name), manager="replicaset-controller")
        for each in pods[wanted:]:
            self._server.delete(each)

    def _pod(self, pod: Json) -> None:
        """As a kubelet: it runs, is ready unless it is held, and is gone once its end was seen."""
        metadata = pod["metadata"]
        if ending(pod):
            self._server.finish(pod)
            return
        if not metadata["name"].rpartition("-")[2].isdigit():
            return
        revision = (metadata.get("labels") or {}).get(f"{SERVING}/revision")
        where = address(int(metadata["name"].rpartition("-")[2]))
        self._report(pod, children.running(pod, where, ready=revision not in self._held))

    def _of(self, revision: str, namespace: str) -> list[Json]:
        found = self._server.objects("v1", "Pod", namespace)
        return [each for each in found if each["metadata"].get("labels", {}).get(f"{SERVING}/revision") == revision]

    def _ready(self, revision: str, namespace: str) -> int:
        pods = self._of(revision, namespace)
        return sum(is_ready(each) and not ending(each) for each in pods)
