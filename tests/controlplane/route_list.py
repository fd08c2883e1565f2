"""The routes that the application really has, for tests that must not forget one."""

import re
from types import SimpleNamespace
from typing import Any, cast

from controlplane.api import machine_api
from controlplane.app.app import build_app
from tests.controlplane.builders import digest


class AnyAttribute:
    """Has whatever it is asked for, and that is nothing."""

    def __getattr__(self, name: str) -> "AnyAttribute":
        return self


def application() -> Any:
    """One machine's, put together. That touches nothing: what its routes act on is needed only when one is called."""
    nothing = cast(Any, AnyAttribute())
    parts = ("replicas", "outcomes", "decider", "jobs", "find_live_replicas")
    running = SimpleNamespace(**dict.fromkeys(parts, nothing))
    running.routers = (machine_api.router(*[nothing] * 3),)
    return build_app(nothing, cast(Any, running), nothing)


def routes_in(app: Any) -> set[tuple[str, str]]:
    """(method, path) of all that an application or router has mounted; HEAD comes with GET."""
    found: set[tuple[str, str]] = set()
    for mounted in app.routes:
        if (inner := getattr(mounted, "original_router", None)) is not None:  # newer FastAPIs include without copying
            found |= routes_in(inner)
        else:
            found |= {(method, mounted.path) for method in mounted.methods if method != "HEAD"}
    return found


def admin_routes() -> set[tuple[str, str]]:
    """(method, path below /admin/v1) of every route of an operator."""
    prefix = "/admin/v1"
    return {(method, path.removeprefix(prefix)) for method, path in routes_in(application()) if path.startswith(prefix)}


def admin_calls() -> list[tuple[str, str]]:
    """(method, path) of a call of each route, by names of what a test has pushed."""
    names = {"model": "m", "version": digest("a"), "tenant": "default"}
    return sorted(
        (method, re.sub(r"{(\w+)}", lambda name: names.get(name[1], "x"), path)) for method, path in admin_routes()
    )
