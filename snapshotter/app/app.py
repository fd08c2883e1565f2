"""The snapshotter's composition root: it builds the parts, connects them and closes them in reverse order."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Response

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore
from kelvin.blobstore.store_factory import open_checked_store
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.errors import Refused
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.setting_parser import BadSetting
from kelvin.crypto.signing_keys import BadKey, Signer, ensure_signer
from kelvin.crypto.trust_roots import PUBLIC_FILE, SECRET_FILE, read_trust
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.openapi import add_description
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import Loops
from kelvin.telemetry.telemetry import describe_certificates, open_without_traces
from snapshotter.app.roles_policy import RULES
from snapshotter.app.routes import inner_routes, push_routes, store_routes
from snapshotter.app.settings import LISTEN, SnapshotterSettings
from snapshotter.maintenance.collector import Collector
from snapshotter.maintenance.fsck import Fsck
from snapshotter.push.gate_jobs import GateJobs, StandaloneEngine
from snapshotter.push.publisher import Publisher
from snapshotter.push.pushes import Pushes, PushLimits
from snapshotter.push.staging import Staging
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.catalog import Catalog
from snapshotter.store.exports import Exports

log = logging.getLogger(__name__)

SOCKET: Final = "snapshotter.sock"
CONTROL_SOCKET: Final = "control.sock"
SWEEP_EVERY_S: Final = 60.0


@asynccontextmanager
async def open_app(settings: SnapshotterSettings, store: BlobStore, jobs: GateJobs) -> AsyncIterator[FastAPI]:
    """Yield the ASGI app over a store and the control plane's jobs. Leaving cancels commits; a retry resumes them."""
    staging = Staging(settings.staging, settings.plans_per_tenant)
    catalog = Catalog(store)
    signer = await asyncio.to_thread(_signer, settings.data)
    attestations = AttestationStore(store, signer, read_trust(settings.data, settings.roots))
    publisher = Publisher(store, staging, catalog, jobs, settings.pack_bytes, attestations)
    limits = PushLimits(settings.chunk_bytes, settings.max_version_bytes, settings.tenant_store_bytes)
    pushes = Pushes(staging, catalog, publisher, jobs, limits, attestations)
    collector = Collector(store, publisher, staging, jobs, settings.collect_grace_s)

    def is_running(tenant: str) -> bool:
        return pushes.commits.is_running(tenant) or collector.is_running(tenant)

    fsck = Fsck(store, is_running, jobs.list_named_versions, attestations, staging.pending_versions)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)
    app.include_router(push_routes(pushes))
    app.include_router(
        store_routes(fsck.check, collector.collect, Exports(store, catalog, jobs.list_named_versions), attestations)
    )
    app.include_router(inner_routes(publisher), include_in_schema=False)
    add_description(app, "/push/v1/openapi.json", "Kelvin: pushing, and objects at rest", Scope.PUSH)
    _add_health(app, store)
    try:
        async with Loops() as loops:
            loops.start("staging sweep", lambda: _sweep(staging, settings.plan_age_s))
            yield app
    finally:
        await pushes.commits.close()


async def serve(settings: SnapshotterSettings, stop: asyncio.Event) -> None:
    """Serve the push API on its socket until `stop`."""
    telemetry = open_without_traces("snapshotter")
    async with AsyncExitStack() as stack:
        directory = SocketDirectory(settings.run)
        stack.callback(directory.close)
        inner = await stack.enter_async_context(
            open_internal_server(directory, settings.peer_settings, Role.SNAPSHOTTER, LISTEN)
        )
        describe_certificates(telemetry.page, inner.certificate_expiry)
        client = ServiceClient.from_connector(
            inner.connector_factory.connector_to(settings.peer_settings.control, Role.CONTROLPLANE), "the control plane"
        )
        stack.push_async_callback(client.close)
        store = VerifyingStore(await stack.enter_async_context(open_checked_store(settings.store_url, writes=True)))
        judge = None if settings.engine is None else StandaloneEngine(settings.engine)
        jobs = GateJobs(client, settings.gate_s, settings.seal_s, judge)
        app = await stack.enter_async_context(open_app(settings, store, jobs))
        listener = stack.enter_context(directory.listen(SOCKET))
        log.info("serving", extra={"socket": SOCKET})
        await inner.serve(telemetry.with_metrics_route(app), listener, RULES, stop)


def _signer(data: Path) -> Signer:
    try:
        return ensure_signer(data / SECRET_FILE, data / PUBLIC_FILE)
    except BadKey as bad:
        raise BadSetting("KELVIN_DATA", str(data), str(bad)) from bad


def _add_health(app: FastAPI, store: BlobStore) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        try:
            await store.stat("ready")
        except BlobNotFound:
            return Response(status_code=200)  # the store answered
        except Refused:
            return Response(status_code=503)
        return Response(status_code=200)


async def _sweep(staging: Staging, max_age_s: float) -> None:
    while True:
        try:
            dropped = await asyncio.to_thread(staging.sweep, time.time(), max_age_s)
        except (OSError, Refused):
            log.exception("the staging directory could not be swept")
        else:
            if dropped:
                log.info("dropped idle pushes", extra={"plans": dropped})
        await asyncio.sleep(SWEEP_EVERY_S)
