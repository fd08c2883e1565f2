"""The admin API's view of one machine: processes, devices, and the cache, whose state comes from a stub cache agent."""

from pathlib import Path
from typing import Any, cast

from aiohttp import web

from controlplane.api import cluster_api, machine_api
from kelvin.contracts.errors import Conflict
from kelvin.contracts.problem import problem_details
from tests.controlplane.control_plane_server import push, report_request, running_control_plane, wait_for_state
from tests.controlplane.route_list import AnyAttribute, routes_in
from tests.stub_server import StubServer


async def test_status_names_processes_devices_and_models(data: Path) -> None:
    """The status has the health of processes, slots and standbys, and all models, as `kelvin status` prints them."""
    async with running_control_plane(data, device_slots="3") as client:
        await push(client)
        # A standby that was parked during a measurement is measured by the next call.
        found = await client.poll_until("/status", lambda found: found["device"]["pools"][0]["memory"]["pss"])
        assert found["cache"] is None, "no cache agent runs here"
        assert [(row["name"], row["healthy"], row["ready"]) for row in found["processes"]] == [
            ("activator", False, False),
            ("cache", False, False),
            ("controlplane", True, True),
            ("snapshotter", False, False),
            ("zygote", True, True),
        ]
        device = found["device"]
        assert (device["slots"], device["held"], device["standbys"]) == (3, 0, 1)
        (pool,) = device["pools"]
        assert (pool["device"], pool["wanted"], pool["why"], pool["parked"]) == ("cpu", 1, "least", 1)
        assert (pool["hits"], pool["misses"], pool["target"], pool["budget_bytes"]) == (0, 0, 0.99, 1 << 30)
        for cost in (pool["memory"], device["zygote"]):
            # A process whose pages are all shared or reclaimed has no private memory.
            assert 0 <= cost["private"] <= cost["pss"] > 0, "what the kernel counts of real processes"
        assert [model["model"] for model in found["models"]] == ["m"]


async def test_cache_calls_name_the_callers_tenant(data: Path) -> None:
    """The cache's state is passed on unchanged. An eviction names the caller's tenant, and its error text is kept."""
    received: list[object] = []

    async def evict(request: web.Request) -> web.Response:
        received.append(await request.json())
        if len(received) > 1:
            problem = problem_details(Conflict("version a", "is leased"))
            return web.Response(body=problem, status=409, content_type="application/problem+json")
        return web.Response(status=204)

    async def state(_: web.Request) -> web.Response:
        return web.json_response({"tiers": {"host": {"bytes": 5}}})

    fault = {"tier": "host", "tenant": "other", "chunk": "c", "kind": "digest"}
    report = {"chunks": {"host": 1}, "bytes": {"host": 2}, "faults": [fault], "contradictions": ["odd"]}

    async def checked(_: web.Request) -> web.Response:
        return web.json_response(report)

    agent = web.Application()
    agent.add_routes([web.get("/v1/state", state), web.post("/v1/evict", evict), web.post("/v1/check", checked)])
    listening = StubServer(agent)
    await listening.start(data / "run" / "cache.sock")
    async with running_control_plane(data) as client:
        assert await client.admin("GET", "/cache") == (200, {"tiers": {"host": {"bytes": 5}}})
        assert (await client.admin("POST", "/cache/evict", {"tier": "host"}))[0] == 204
        status, problem = await client.admin("POST", "/cache/evict", {"tier": "nvme", "version": "a"})
        assert (status, problem["detail"]) == (409, "version a: is leased")
        assert await client.admin("POST", "/cache/check") == (200, report)
    await listening.stop()
    assert received == [
        {"tier": "host", "tenant": "default"},
        {"tier": "nvme", "version": "a", "tenant": "default"},
    ]


async def test_standbys_keep_to_their_settings(data: Path) -> None:
    """If no standby fits the budget, none is kept, the status says why, and a model still starts from zero."""
    async with running_control_plane(data, standbys="2", standby_bytes=str(1 << 20), standby_target="0.9") as client:
        await push(client)
        await report_request(client)
        await wait_for_state(client, "ready")
        (pool,) = (await client.admin("GET", "/status"))[1]["device"]["pools"]
        assert (pool["wanted"], pool["why"], pool["parked"], pool["hits"], pool["misses"]) == (0, "budget", 0, 0, 1)
        assert (pool["target"], pool["budget_bytes"], pool["probability"]) == (0.9, 1 << 20, 0.0)
    async with running_control_plane(data, standby_share="1") as client:
        await push(client, "n")
        await report_request(client, "n")
        await wait_for_state(client, "ready", "n")
        # One standby for each running replica, adopted ones included.
        await client.poll_until("/status", lambda found: _size(found["device"]["pools"]) == (2, "share"))


def _size(pools: list[dict[str, Any]]) -> tuple[int, str]:
    (pool,) = pools
    return pool["wanted"], pool["why"]


def test_cluster_routes_match_machine_routes() -> None:
    """A cluster answers every route that one machine has."""
    nothing = cast(Any, AnyAttribute())
    assert routes_in(cluster_api.router(nothing)) == routes_in(machine_api.router(*[nothing] * 3))
