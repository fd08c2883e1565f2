"""The routes that the application really has, for tests that must not forget one."""

from typing import Any, cast

from fastapi.routing import APIRoute

from controlplane import access_api, admin_api, audit_api, billing_api, machine_api


class Nothing:
    """Has whatever it is asked for, and that is nothing."""

    def __getattr__(self, name: str) -> "Nothing":
        return self


def admin_routes() -> set[tuple[str, str]]:
    """(method, path below /admin/v1) of every route of an operator."""
    # Building routers touches nothing: what they act on is needed only when one is called.
    nothing = cast(Any, Nothing())
    routers = (
        admin_api.router(*[nothing] * 4),
        machine_api.router(*[nothing] * 3),
        access_api.router(*[nothing] * 4),
        access_api.grants_router(*[nothing] * 4),
        audit_api.router(nothing, nothing, nothing),
        billing_api.router(nothing, nothing, nothing),
    )
    return {
        (method, route.path.removeprefix("/admin/v1"))
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.path.startswith("/admin/v1")
        for method in route.methods or ()
    }
