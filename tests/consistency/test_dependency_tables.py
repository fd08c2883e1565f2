"""Each service's dependency table: timeouts in code come from it, docs contain it, each entry has an outage test."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from activator.dependencies import DEPENDENCIES as ACTIVATOR
from activator.dependencies import SERVING
from controlplane.dependencies import DEPENDENCIES as CONTROLPLANE
from kelvin.contracts.dependency import Dependency, dependency_table
from runtime.dependencies import DEPENDENCIES as RUNTIME
from snapshotter.dependencies import DEPENDENCIES as SNAPSHOTTER
from weightcache.dependencies import DEPENDENCIES as WEIGHTCACHE

ROOT: Final = Path(__file__).parents[2]
OF: Final[dict[str, Sequence[Dependency]]] = {
    "activator": ACTIVATOR,
    "controlplane": CONTROLPLANE,
    "runtime": RUNTIME,
    "snapshotter": SNAPSHOTTER,
    "weightcache": WEIGHTCACHE,
}
TAKEN_AWAY: Final = {
    "activator": {each.name: "test_dependencies.py::test_dependency_outage_behaves_as_declared" for each in SERVING}
    | {
        "waking": "scale_link/test_fallback_scaler.py::test_failed_own_start_refuses_waiting_requests",
        "accounts": "scale_link/test_fallback_scaler.py::test_fallback_scaler_never_exceeds_device_slots",
        "autoscaler": "scale_link/test_knative_cluster.py::test_without_the_autoscaler_what_runs_serves_on",
        "pod": "upstream/test_readiness_prober.py::test_refused_probe_is_repeated",
    },
    "controlplane": {
        "zygote": "scaling/local/test_local_actuator.py::test_start_without_zygote_fails",
        "restore": "scaling/local/test_local_actuator.py::test_failed_restore_fails_requests_and_ends_the_runtime",
        "orders": "test_dependencies.py::test_unresponsive_replica_ends_after_its_drain_time",
        "reports": "test_dependencies.py::test_drain_without_reports_ends_after_its_time",
        "adoption": "scaling/local/test_adopter.py::test_silent_runtime_is_left_for_the_next_sweep",
        "sleep": "test_dependencies.py::test_replica_that_cannot_sleep_is_ended",
        "siblings": "api/test_machine_api.py::test_status_names_processes_devices_and_models",
        "eviction": "test_dependencies.py::test_without_a_cache_agent_models_start",
        "examination": "test_dependencies.py::test_without_a_cache_agent_models_start",
        "readers": "api/test_internal_api.py::test_a_reader_that_does_not_read_is_dropped",
        "database": "db/test_locked_database.py::test_locked_database_wakes_models_and_refuses_records",
        "cluster": "knative/apply/test_applier.py::test_unreachable_cluster_is_not_called_per_object",
        "watch": "knative/apply/test_list_watch.py::test_silent_watch_is_restarted",
        "pool": "knative/pools/test_pool_controller.py::test_restarted_or_terminating_pod_is_replaced",
        "lease": "app/test_leader_election.py::test_leader_that_cannot_renew_stops_first",
    },
    "runtime": {
        "weights": "lifecycle/test_replica.py::test_failed_restore_fails_the_replica",
        "ledger": "api/test_orphan_records.py::test_unshipped_records_stay_for_recovery",
        "seals": "app/test_app.py::test_seal_upload_stops_after_three_tries",
        "filters": "surface/test_filter_pipeline.py::test_silent_filter_refuses_the_request",
        "reader": "api/test_delivery.py::test_a_client_that_does_not_read_is_cancelled",
    },
    "snapshotter": {
        "gate": "app/test_routes.py::test_passing_failures_can_be_repeated",
        "seal": "app/test_routes.py::test_passing_failures_can_be_repeated",
        "registry": "push/test_push_quota.py::test_a_tenants_own_limit",
        "store": "test_dependencies.py::test_push_succeeds_once_the_store_is_back",
    },
    "weightcache": {
        "store": "fetch/test_attestation_loader.py::test_a_start_without_the_store",
        "news": "fetch/test_attestation_loader.py::test_a_start_without_the_store",
        "peers": "peers/test_peers.py::test_unreachable_peer_is_replaced_by_the_store",
        "peers' answers": "peers/test_peers.py::test_failing_peer_is_replaced_by_the_store",
    },
}
NAMED: Final = frozenset(
    ["timeout_s", "total", "connect", "sock_connect", "sock_read", "socket_timeout", "socket_connect_timeout"]
)


def own_numbers(source: str) -> Iterator[int]:
    """Yield lines of calls whose timeout is a number, or a name for a number in the same module."""
    tree = ast.parse(source)
    numbers = {
        ast.unparse(node.target)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for value in (each.value for call in calls for each in call.keywords if each.arg in NAMED):
        literal = isinstance(value, ast.Constant) and value.value is not None
        if literal or any(isinstance(node, ast.Name) and node.id in numbers for node in ast.walk(value)):
            yield value.lineno


@pytest.mark.parametrize("service", OF)
def test_timeouts_come_from_the_table(service: str) -> None:
    """No call in the service passes a number of its own as a timeout parameter (see `NAMED`)."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / service).rglob("*.py"))
        if path.name != "dependencies.py" and (lines := list(own_numbers(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("call(timeout_s=5.0)", [1], id="a number"),
        pytest.param("ASK_S: Final = 5.0\ncall(timeout_s=ASK_S)", [2], id="a name for one"),
        pytest.param("ASK_S: Final = 5.0\ncall(total=wait_s + ASK_S)", [2], id="more than it"),
        pytest.param("ASK_S: Final = dependencies.X.timeout_s\ncall(timeout_s=ASK_S)", [], id="the table's"),
        pytest.param("call(timeout_s=None)", [], id="none"),
    ],
)
def test_the_control_finds_numbers(source: str, found: list[int]) -> None:
    assert list(own_numbers(source)) == found


@pytest.mark.parametrize("service", OF)
def test_the_page_has_the_table(service: str) -> None:
    """The outages page contains the table word for word, and the metrics page explains each indicator."""
    assert dependency_table(OF[service]) in (ROOT / "docs" / "operations" / "outages.md").read_text()
    rest = (ROOT / "docs" / "operations" / "metrics.md").read_text()
    assert [each.indicator for each in OF[service] if f"`{each.indicator}`" not in rest] == []


@pytest.mark.parametrize("service", TAKEN_AWAY)
def test_each_dependency_has_an_outage_test(service: str) -> None:
    """Every dependency names an existing outage test, in the order of the table."""
    named = TAKEN_AWAY[service]
    assert list(named) == [each.name for each in OF[service]]
    for where in named.values():
        file, _, test = where.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / service / file).read_text(), where
