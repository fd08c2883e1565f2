"""List the routes that the application really has, so that a test covers all of them."""

import re
from types import SimpleNamespace
from typing import Any, cast

from controlplane.api import machine_api
from controlplane.app.app import build_app
from tests.controlplane.builders import digest


class AnyAttribute:
    """An object whose every attribute is the object itself."""

    def __getattr__(self, name: str) -> "AnyAttribute":
        return self


def application() -> Any:
    """Return the application of one machine with empty collaborators. They are used only when a route is called."""
    nothing = cast(Any, AnyAttribute())
    parts = ("replicas", "outcomes", "scaler", "jobs", "find_live_replicas")
    running = SimpleNamespace(**dict.fromkeys(parts, nothing))
    running.routers = (machine_api.router(*[nothing] * 3),)
    return build_app(nothing, cast(Any, running), nothing)


def routes_in(app: Any) -> set[tuple[str, str]]:
    """Return (method, path) of every route of an application or router, without HEAD."""
    found: set[tuple[str, str]] = set()
    for mounted in app.routes:
        if (inner := getattr(mounted, "original_router", None)) is not None:  # newer FastAPIs do not copy routers
            found |= routes_in(inner)
        else:
            found |= {(method, mounted.path) for method in mounted.methods if method != "HEAD"}
    return found


def admin_routes() -> set[tuple[str, str]]:
    """Return (method, path below /admin/v1) of every admin route."""
    prefix = "/admin/v1"
    return {(method, path.removeprefix(prefix)) for method, path in routes_in(application()) if path.startswith(prefix)}


def admin_calls() -> list[tuple[str, str]]:
    """Return (method, path) of one call per admin route, with the names of the objects that tests push."""
    names = {"model": "m", "version": digest("a"), "tenant": "default"}
    return sorted(
        (method, re.sub(r"{(\w+)}", lambda name: names.get(name[1], "x"), path)) for method, path in admin_routes()
    )
