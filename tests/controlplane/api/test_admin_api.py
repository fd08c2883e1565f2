"""The admin API over its socket: what an operator sees and changes, and the errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.registry.registry import Registry
from controlplane.scaling.policy.scale_settings import ScaleSettings
from tests.controlplane.builders import digest
from tests.controlplane.control_plane_server import (
    ADMIN,
    ControlPlaneClient,
    model_status,
    open_feed,
    push,
    report_request,
    running_control_plane,
    wait_for_state,
)
from tests.controlplane.machine_fixture import RunDirectory


async def test_model_status_follows_push_start_and_stop(data: Path) -> None:
    """The status goes from zero to restoring and ready, with the spans of the restore, and back to zero."""
    async with running_control_plane(data) as client:
        await push(client, "held")
        found = await model_status(client, "held")
        assert (found["state"], found["replicas"], found["version"]) == ("zero", 0, digest("a"))
        assert found["last_restore"] is None
        await report_request(client, "held")
        await wait_for_state(client, "restoring", "held")
        (data / "run" / "release").touch()
        found = await wait_for_state(client, "ready", "held")
        assert found["replicas"] == 1
        stages = [span["stage"] for span in found["last_restore"]["spans"]]
        assert stages == ["decided", "promoted", "leased", "ready"]
        (version,) = found["versions"]
        assert [each["state"] for each in version["replicas"]] == ["ready"]
        status, _ = await client.admin("POST", "/models/held/stop")
        assert status == 202
        await wait_for_state(client, "zero", "held")


async def test_a_failed_restore_is_shown_and_marks_the_version(data: Path) -> None:
    """The status shows the reason, the version is faulty, and it cannot be deployed."""
    async with running_control_plane(data) as client:
        await push(client, "corrupt", "b")
        await push(client, "corrupt", "a")
        await report_request(client, "corrupt")
        found = await client.poll_until("/models/corrupt", lambda found: found["versions"][1]["health"] == "faulty")
        version = found["versions"][1]
        assert (version["version"], version["fault"]) == (digest("a"), "chunk_corrupt")
        assert version["last_restore"]["failure_code"] == "chunk_corrupt"
        status, problem = await client.admin("POST", "/models/corrupt/deploy", {"version": digest("a")})
        assert (status, problem["code"]) == (409, "conflict")


async def test_deploy_moves_prod(data: Path) -> None:
    """Twelve digits of the version are enough. The answer has the whole digest."""
    async with running_control_plane(data) as client:
        await push(client, letter="a")
        await push(client, letter="b")
        assert await client.admin("POST", "/models/m/deploy", {"version": "b" * 12}) == (
            200,
            {"model": "m", "version": digest("b")},
        )
        assert (await model_status(client))["aliases"] == {"prod": digest("b")}


async def test_only_stated_scale_settings_change(data: Path) -> None:
    """Each setting changes alone. A minimum of one starts a replica without traffic."""
    async with running_control_plane(data) as client:
        await push(client)
        defaults = msgspec.to_builtins(ScaleSettings())
        assert await client.admin("PUT", "/models/m/scale", {}) == (200, defaults)
        want = {**defaults, "min": 1, "window_s": 6.0}
        assert await client.admin("PUT", "/models/m/scale", {"min": 1, "window_s": 6}) == (200, want)
        assert (await model_status(client))["scale"] == want
        await wait_for_state(client, "ready")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        pytest.param("GET", "/models/nope", None, 404, "the model 'nope' does not exist", id="an unknown model"),
        pytest.param("POST", "/models/m/deploy", {}, 400, "missing required field `version`", id="no version"),
        pytest.param(
            "POST", "/models/m/deploy", {"version": "a" * 12, "x": 1}, 400, "unknown field `x`", id="an unknown field"
        ),
        pytest.param("POST", "/models/m/deploy", b"{", 400, "Input data was truncated", id="invalid JSON"),
        pytest.param("PUT", "/models/m/scale", {"max": 0}, 400, ">= 1", id="a maximum of zero"),
        pytest.param(
            "PUT", "/models/m/scale", {"min": 2}, 400, "min=2: must be 1 (max) or less", id="minimum above maximum"
        ),
        pytest.param("PUT", "/models/m/scale", {"window_s": 5}, 400, "at `$.window_s`", id="a short window"),
        pytest.param(
            "PUT", "/models/m/scale", {"window_s": 6.5}, 400, "window_s=6.5: must be whole seconds", id="a half second"
        ),
        pytest.param(
            "PUT",
            "/models/m/scale",
            {"min": 9, "max": 9},
            400,
            "min=9: must be 8 or less: your tenant's share of 8 device slots is 8",
            id="a minimum beyond the tenant's share",
        ),
        pytest.param("PUT", "/models/m/scale", {"target": 0}, 400, "> 0", id="a target of zero"),
        pytest.param("PUT", "/models/m/scale", {"grace_s": "3"}, 400, "Expected `float`", id="a text for a number"),
        pytest.param(
            "PUT", "/models/m/scale", b" " * 70_000, 413, "larger than 65536 bytes", id="a body that is too large"
        ),
        pytest.param("POST", "/cache/evict", {"tier": "tape"}, 400, "Invalid enum value 'tape'", id="no such tier"),
        pytest.param(
            "POST",
            "/cache/evict",
            {"tier": "host", "tenant": "other"},
            404,
            "'other' does not exist",
            id="another's cache",
        ),
        pytest.param("GET", "/cache", None, 503, "cache is not available", id="the cache is not running"),
        pytest.param("DELETE", "/models/m", None, 409, "'prod' names a version of it", id="a model with an alias"),
        pytest.param("DELETE", "/models/n?force=true", None, 404, "'n' does not exist", id="no such model"),
        pytest.param("PATCH", "/models/m", None, 405, "not allowed", id="no such method"),
        pytest.param("GET", "/nothing", None, 404, "does not exist", id="no such route"),
    ],
)
async def test_refusals(data: Path, method: str, path: str, body: object, status: int, says: str) -> None:
    """The error names the value and the rule, and nothing has changed."""
    async with running_control_plane(data) as client:
        await push(client)
        before = await model_status(client)
        got, problem = await client.admin(method, path, body)
        assert got == status
        assert says in problem["detail"]
        assert problem["status"] == status
        assert await model_status(client) == before


async def test_model_in_use_is_deleted_only_by_force(data: Path) -> None:
    """It is refused while the model serves or has an alias. With `force` the model and its replicas are deleted,
    activators and the audit see it, and a restart does not bring it back. A new push makes a new model.
    """
    async with running_control_plane(data) as client, open_feed(client) as reader:
        await push(client)
        await push(client, letter="b")
        await report_request(client)
        await wait_for_state(client, "ready")
        status, problem = await client.admin("DELETE", "/models/m")
        assert status == 409
        assert problem["detail"] == (
            "model 'm': the alias 'prod' names a version of it and replicas run 1 of its versions; "
            "with `force` it is deleted all the same"
        )
        status, gone = await client.admin("DELETE", "/models/m?force=true")
        assert (status, gone) == (200, {"model": "m", "versions": [digest("a"), digest("b")]})
        assert (await client.admin("GET", "/models/m"))[0] == 404
        removed: set[tuple[str, str]] = set()
        while not removed:
            line = await reader.line()
            removed = set(line.removed_models)
        assert removed == {("default", "m")}
        assert {version for _, _, version in line.removed_versions} == {digest("a"), digest("b")}
        await client.poll_until("/status", lambda found: not found["device"]["held"])
        status, named = await client.request("GET", "/internal/v1/versions?tenant=default")
        assert named == {"versions": []}
        (event,) = [e for e in (await client.admin("GET", "/audit"))[1]["events"] if e["action"] == "model.deleted"]
        assert (event["subject"], event["actor"]) == ("m", "k")
    async with running_control_plane(data) as client:
        assert (await client.admin("GET", "/models"))[1] == {"models": []}
        await push(client, letter="b")
        found = await model_status(client)
        assert (found["version"], len(found["versions"])) == (digest("b"), 1)


async def test_an_unforeseen_error_leaks_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is 500 `internal`, without the error's text."""

    def breaks(*_: object) -> None:
        raise RuntimeError("secret")

    async with running_control_plane(data) as client:
        monkeypatch.setattr(Registry, "models", breaks)
        status, problem = await client.request("GET", "/admin/v1/models", None, ADMIN)
        assert (status, problem["code"]) == (500, "internal")
        assert "secret" not in json.dumps(problem)
        monkeypatch.undo()


async def _restart(client: ControlPlaneClient, method: str = "GET", model: str = "m") -> tuple[int, Any]:
    return await client.admin(method, f"/models/{model}/restart")


async def _ended(client: ControlPlaneClient, model: str = "m") -> Any:
    return await client.poll_until(f"/models/{model}/restart", lambda found: found["state"] != "running")


async def _noted(client: ControlPlaneClient) -> int:
    """Return the number of audit entries about restarts."""
    _, found = await client.admin("GET", "/audit")
    return sum(each["action"] == "model.restarted" for each in found["events"])


async def test_restart_order_shows_its_progress(data: Path) -> None:
    """A second restart is refused while one runs. A model at zero is done at once; an unknown model is 404."""
    async with running_control_plane(data) as client:
        await push(client)
        assert (await _restart(client))[1]["state"] == "none"
        _, nothing = await _restart(client, "POST")
        assert nothing["replicas"] == 0
        assert (await _ended(client))["state"] == "done"
        await report_request(client)
        before = await wait_for_state(client, "ready")
        status, ordered = await _restart(client, "POST")
        assert (status, ordered["state"], ordered["replicas"], ordered["replaced"]) == (202, "running", 1, 0)
        status, problem = await _restart(client, "POST")
        assert (status, problem["code"]) == (409, "conflict")
        assert "0 of 1 replicas are replaced" in problem["detail"]
        assert await _ended(client) == {**ordered, "state": "done", "replaced": 1}
        after = await wait_for_state(client, "ready")
        (old,), (new,) = (found["versions"][0]["replicas"] for found in (before, after))
        assert old["runtime_id"] != new["runtime_id"]
        for method in ("GET", "POST"):
            assert (await _restart(client, method, "nothing"))[0] == 404


async def test_audit_has_accepted_restarts_only(data: Path) -> None:
    """Of four restarts at once, one is accepted and has an entry. The refused ones have none."""
    run = RunDirectory(data / "run")
    async with running_control_plane(data) as client:
        await push(client, "held")
        run.tell("release")
        await report_request(client, "held")
        await wait_for_state(client, "ready", "held")
        (run.path / "release").unlink()  # the new replica waits for this file
        answers = await asyncio.gather(*(_restart(client, "POST", "held") for _ in range(4)))
        assert sorted(status for status, _ in answers) == [202, 409, 409, 409]
        assert await _noted(client) == 1
        run.tell("release")
        assert (await _ended(client, "held"))["state"] == "done"
