"""All processes' metrics as one page, for a scraper that has a key and no way to the sockets."""

from fastapi import APIRouter, Request, Response

from contracts.control import Scope
from controlplane.peers import Peers
from controlplane.policy.replica_life import SERVING
from controlplane.replicas import ReplicaTable
from service.openapi import described
from service.principal import holder_of
from telemetry.policy.exposition import CONTENT_TYPE, merge, render
from telemetry.policy.instruments import Family, Kind, by
from telemetry.telemetry import Telemetry


def router(telemetry: Telemetry, peers: Peers, table: ReplicaTable) -> APIRouter:
    """`GET /admin/v1/metrics`: all of the installation's, so for operators alone."""
    routes = APIRouter(prefix="/admin/v1")
    operator_of = holder_of(Scope.OPERATOR)

    @routes.get("/metrics", **described(str, scope=Scope.OPERATOR))
    async def metrics(request: Request) -> Response:
        operator_of(request)
        serving = (replica.runtime_id for replica in table if replica.state in SERVING)
        found = await peers.metrics(serving)
        heard = by((name, page is not None) for name, page in found.items() if name in peers.names)
        up = render((Family("kelvin_up", "Whether it answers.", Kind.GAUGE, ("peer",), heard),), "controlplane")
        pages = (up, telemetry.text(), *(page for page in found.values() if page is not None))
        return Response(merge(pages), media_type=CONTENT_TYPE)

    return routes
