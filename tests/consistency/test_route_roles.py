"""Every internal route is allowed for a role, or for the local socket only. A route without a rule is refused."""

from pathlib import Path
from typing import Final

import pytest

from controlplane.api.roles_policy import RULES as CONTROL
from controlplane.api.roles_policy import SOCKET_ONLY_PATHS
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND
from kelvin.contracts.roles import Role, Rules, role_may_call
from runtime.api.control_api import build_control_app
from runtime.app.roles_policy import RULES as RUNTIME
from snapshotter.app.roles_policy import RULES as SNAPSHOTTER
from tests.consistency.documented_facts import of_services, routes_of_app

BACKUP: Final = "/internal/v1/backup"


def _paths(app: object) -> set[str]:
    return {path for _, path in routes_of_app(app)}


def _unruled(rules: Rules, paths: set[str]) -> set[str]:
    return {path for path in paths if not any(role_may_call(rules, role, path) for role in Role)}


def test_every_route_has_a_rule(tmp_path: Path) -> None:
    """Every route has a rule or is for the socket only, and every rule has a route."""
    control, snapshotter = of_services(tmp_path, _paths)
    assert _unruled(CONTROL, control) == SOCKET_ONLY_PATHS
    assert _unruled(SNAPSHOTTER, snapshotter) == set()
    asked = {path for paths in ROUTES_BY_KIND.values() for path in paths}
    assert _unruled(RUNTIME, asked | _paths(build_control_app())) == set()
    for rules, paths in ((CONTROL, control), (SNAPSHOTTER, snapshotter)):
        assert [rule for rule in rules if not any(f"{path}/".startswith(f"{rule}/") for path in paths)] == []


@pytest.mark.parametrize(
    ("rules", "path", "want"),
    [
        pytest.param(CONTROL, "/internal/v1/feed", {Role.ACTIVATOR}, id="the digests of keys"),
        pytest.param(CONTROL, "/admin/v1/keys", {Role.ACTIVATOR}, id="on behalf of a caller"),
        pytest.param(CONTROL, "/internal/v1/usage/requests", {Role.ACTIVATOR, Role.RUNTIME}, id="records"),
        pytest.param(CONTROL, "/internal/v1/usage/lifetimes", {Role.RUNTIME}, id="lifetimes of pods"),
        pytest.param(CONTROL, "/internal/v1/usage/lives", {Role.RUNTIME}, id="pods that still live"),
        pytest.param(CONTROL, "/internal/v1/jobs/seal", {Role.SNAPSHOTTER}, id="jobs"),
        pytest.param(CONTROL, BACKUP, set(), id="the installation's secrets"),
        pytest.param(SNAPSHOTTER, "/push/v1/plans", {Role.ACTIVATOR}, id="pushes"),
        pytest.param(SNAPSHOTTER, "/internal/v1/seals", {Role.RUNTIME}, id="seals"),
        pytest.param(RUNTIME, "/v1/chat/completions", {Role.ACTIVATOR}, id="requests"),
        pytest.param(RUNTIME, "/v2/infer", {Role.ACTIVATOR}, id="predictions"),
        pytest.param(RUNTIME, "/control/bind", {Role.CONTROLPLANE}, id="control of a runtime"),
    ],
)
def test_each_role_reaches_only_its_routes(rules: Rules, path: str, want: set[Role]) -> None:
    assert {role for role in Role if role_may_call(rules, role, path)} == want
