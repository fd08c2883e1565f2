"""Where a cluster runs the versions every path of one machine is there: answered, or refused with what is done."""

from typing import Any, cast

from fastapi.routing import APIRoute

from controlplane import cluster_api, machine_api
from tests.controlplane.routes_of import Nothing


def routes(*routers: Any) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }


def test_the_same_paths() -> None:
    """No call gets 404 there for what one machine has."""
    nothing = cast(Any, Nothing())
    assert routes(cluster_api.router(nothing)) == routes(machine_api.router(*[nothing] * 3))
