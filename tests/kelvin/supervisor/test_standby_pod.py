"""A standby pod: probes, commands over mutual TLS, one tenant after another. Real processes."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.artifacts.runtime_control import BindPodRequest
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from kelvin.contracts.wire import decode
from kelvin.spool.leftover_recovery import leftover_records
from kelvin.supervisor.exit_recorder import LIFETIME_PREFIX
from tests.kelvin.orders import Orders, take_of
from tests.kelvin.pods import PROMPT, standby
from tests.runtime.processes import DEADLINE_S, Installation, poll_until
from tests.weightcache.kit import Version

QUEUE = {"K-Network-Probe": "queue"}


def wait_until_parked(orders: Orders, other_than: str = "") -> str:
    """Return the runtime id of the parked runtime, once there is one other than `other_than`."""
    return poll_until("it waits", lambda: orders.parked(other_than))


def lives(data: Path) -> list[LifetimeRecord]:
    """Return the recorded lifetimes."""
    found = leftover_records(data / "spool", lambda source: source.startswith(LIFETIME_PREFIX))
    return [decode(raw, LifetimeRecord) for raw in found]


def kept(data: Path, name: str) -> list[Path]:
    """Return the files of the pod's cache whose name contains `name`."""
    return [path for path in (data / "cache").rglob("*") if path.is_file() and name in path.name]


def test_standby_pod_serves_versions_in_turn(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """A standby pod is ready but accepts no requests. Only the control plane can bind it, once, to a version that fits;
    a repeated bind gets the same reply. A release drains it. Then a fresh process waits without data of the last
    version, and the last one's life is recorded for its tenant."""
    house, version = sealed
    orders, take = Orders.made(tmp_path), take_of(house, version)
    with standby(house, tmp_path / "data", "--weights", "5000", **orders.settings) as each:
        first = wait_until_parked(orders)
        assert (each.get("/readyz")[0], each.get("/healthz")[0]) == (200, 200)
        assert each.get("/healthz", QUEUE)[0] == 503, "no request may come"
        assert each.ask(PROMPT)[0] == 503
        assert each.get("/control/state")[0] == 404, "not by the way of requests"
        for role in set(Role) - {Role.CONTROLPLANE}:
            assert orders.by(role).tell("bind", take)[0] == 404
        for other, status in unfit_requests(take):
            assert orders.tell("bind", other)[0] == status
        assert orders.tell("release", take)[0] == 204
        assert orders.ask("GET", "/control/state")[1]["state"] == "standby", "all of that changed nothing"

        status, bound = orders.tell("bind", take)
        assert (status, bound["runtime_id"]) == (200, first)
        assert orders.tell("bind", take) == (200, bound)
        assert orders.tell("bind", msgspec.structs.replace(take, model="other"))[0] == 409
        assert orders.tell("release", msgspec.structs.replace(take, model="other"))[0] == 409
        assert (each.get("/readyz")[0], each.get("/healthz", QUEUE)) == (200, (200, b"queue"))
        assert each.ask(PROMPT)[0] == 200
        (left,) = kept(each.data, version.digests[0])
        connection, answer = each.open(PROMPT | {"max_tokens": 200, "stream": True})
        head = answer.read(1)
        assert orders.tell("release", take)[0] == 202
        frames = FrameDecoder().feed(head + answer.read())
        connection.close()
        assert frames[-1].kind is FrameKind.END
        assert frames[-1].counts.completion_tokens == 200
        second = wait_until_parked(orders, first)
        assert each.get("/healthz", QUEUE)[0] == 503
        assert not left.exists()
        (life,) = lives(each.data)
        assert (life.runtime_id, life.tenant, life.model) == (first, take.tenant, "m")
        assert life.standby_us > 0
        assert life.restore_us > 0
        assert life.requests == 2

        status, again = orders.tell("bind", take)
        assert (status, again["runtime_id"]) == (200, second)
        assert sum(again["bytes_by_tier"].values()) == sum(bound["bytes_by_tier"].values())
        assert again["bytes_by_tier"] == bound["bytes_by_tier"], "from the store, as if it had never been here"
        each.process.send_signal(signal.SIGTERM)
        assert each.process.wait(DEADLINE_S) == 0


def unfit_requests(take: BindPodRequest) -> Iterator[tuple[BindPodRequest, int]]:
    """Yield bind requests that don't fit the pod, with the status of each refusal."""
    yield msgspec.structs.replace(take, device_class="h100"), 400
    yield msgspec.structs.replace(take, store="s3://elsewhere/prod"), 400
    yield msgspec.structs.replace(take, weight_bytes=5001), 507


def test_bind_continues_after_its_caller_left(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """A bind continues after its caller disconnects, and a later caller gets its result. After a failed restore or a
    kill, a fresh process waits."""
    house, version = sealed
    orders, take = Orders.made(tmp_path), take_of(house, version)
    with standby(house, tmp_path / "data", **orders.settings) as each:
        first = wait_until_parked(orders)
        missing = msgspec.structs.replace(take, version="0" * 64)
        status, problem = orders.tell("bind", missing)
        assert (status, problem["code"]) == (500, "manifest_missing")
        second = wait_until_parked(orders, first)

        orders.open("bind", take).close()
        found = poll_until("it serves", lambda: bound_to(orders))
        assert (found, orders.tell("bind", take)[1]["runtime_id"]) == (second, second)
        assert each.ask(PROMPT)[0] == 200

        os.kill(each.child("runtime.app.pod"), signal.SIGKILL)
        wait_until_parked(orders, second)
        assert sorted((life.tenant or "", life.exit_status) for life in lives(each.data)) == [
            (take.tenant, -signal.SIGKILL),
            (take.tenant, 1),
        ]
        each.process.send_signal(signal.SIGTERM)
        assert each.process.wait(DEADLINE_S) == 0


def bound_to(orders: Orders) -> str | None:
    """Return the id of the serving runtime, or None."""
    state = orders.state()
    return str(state["runtime_id"]) if state is not None and state["state"] == "ready" else None


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        pytest.param(("0" * 64,), {}, b"VERSION and --standby: only one of them can be said", id="both forms"),
        pytest.param((), {"STANDBY_LISTEN": ""}, b"KELVIN_STANDBY_LISTEN=: is required", id="no address to listen on"),
        pytest.param((), {"INNER_TLS": "/none"}, b"/none/tls.crt can't be read", id="no certificates"),
    ],
)
def test_bad_arguments(
    sealed: tuple[Installation, Version],
    tmp_path: Path,
    options: tuple[str, ...],
    settings: dict[str, str],
    words: bytes,
) -> None:
    """The error is logged before any process starts."""
    house, _ = sealed
    with standby(house, tmp_path / "data", *options, **(Orders.made(tmp_path).settings | settings)) as each:
        _, lines = each.process.communicate(timeout=DEADLINE_S)
        assert each.process.returncode != 0
    assert words in lines, json.dumps(lines.decode())
