"""What the admin API says of one machine: its processes and devices, and its cache, which is asked for it."""

import asyncio
from pathlib import Path

from aiohttp import web

from contracts.errors import Conflict
from contracts.problem import problem_details
from tests.controlplane.door import opened, push
from tests.listening import Listening


async def test_status_names_processes_devices_and_models(data: Path) -> None:
    """Who answers and who is ready, slots and standbys, all models: what `kelvin status` prints."""

    async with opened(data, device_slots="3") as door:
        await push(door)
        async with asyncio.timeout(20):
            while (await door.admin("GET", "/status"))[1]["device"]["standbys"] == 0:
                await asyncio.sleep(0.005)
        _, found = await door.admin("GET", "/status")
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
            assert 0 < cost["private"] <= cost["pss"], "what the kernel counts of real processes"
        assert [model["model"] for model in found["models"]] == ["m"]


async def test_the_cache_is_asked_and_told_for_the_callers_tenant(data: Path) -> None:
    """Its state comes through as it is; an eviction names the caller's tenant, and a refusal keeps its own words."""
    told: list[object] = []

    async def evict(request: web.Request) -> web.Response:
        told.append(await request.json())
        if len(told) > 1:
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
    listening = Listening(agent)
    await listening.start(data / "run" / "cache.sock")
    async with opened(data) as door:
        assert await door.admin("GET", "/cache") == (200, {"tiers": {"host": {"bytes": 5}}})
        assert (await door.admin("POST", "/cache/evict", {"tier": "host"}))[0] == 204
        status, problem = await door.admin("POST", "/cache/evict", {"tier": "nvme", "version": "a"})
        assert (status, problem["detail"]) == (409, "version a: is leased")
        assert await door.admin("POST", "/cache/check") == (200, report)
    await listening.stop()
    assert told == [
        {"tier": "host", "tenant": "default"},
        {"tier": "nvme", "version": "a", "tenant": "default"},
    ]
