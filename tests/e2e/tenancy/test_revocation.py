"""A revocation reaches every activator within a second: one control plane, two activators, all of them real."""

import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from coldstart_bench.harness.installation import free_port
from tests.controlplane.control_plane_server import program
from tests.controlplane.machine_fixture import RunDirectory, fake_zygote
from tests.e2e.installation_processes import service
from tests.eventually import wait

pytestmark = pytest.mark.deep

PATIENCE_S = 60.0
WITHIN_S = 1.0


@contextmanager
def _activator(data: Path) -> Iterator[tuple[str, str]]:
    """Its URL, and where it says how it is: not at its door, and its socket has the name of the other one's."""
    port, health = free_port(), f"127.0.0.1:{free_port()}"
    settings = {"KELVIN_DATA": str(data), "KELVIN_PORT": str(port), "KELVIN_HEALTH_LISTEN": health}
    with service(data.parent / "activator.log", settings, "activator"):
        yield f"https://localhost:{port}", f"http://{health}/readyz"


def _feed(client: httpx.Client, readyz: str) -> str:
    """What the activator stands on; any answer but one of its health is a mistake of ours."""
    try:
        return str(client.get(readyz).json()["feed"])
    except httpx.TransportError:
        return "silent"


def _status(client: httpx.Client, url: str, key: str) -> int:
    try:
        return client.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
    except httpx.TransportError:
        return 0


def _seconds_until(client: httpx.Client, urls: list[str], key: str, status: int, limit_s: float) -> float | None:
    """Until each of them answers the key so; None where one does not within the limit."""
    began = time.monotonic()
    for url in urls:
        while _status(client, url, key) != status:
            if time.monotonic() - began > limit_s:
                return None
            time.sleep(0.002)
    return time.monotonic() - began


def test_a_revoked_key_is_bad_everywhere_within_a_second(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Measured from the call that revokes it. Negative control: a rotated one, within its overlap, stays good."""
    data = tmp_path / "data"
    (data / "run").mkdir(parents=True)
    written = [data / name for name in ("ca.pem", "admin.key", "default.key")]
    with fake_zygote(RunDirectory(data / "run")), program(data), _activator(data) as (first, first_health):
        wait(lambda: all(each.exists() for each in written), "the keys are written")
        trust = ssl.create_default_context(cafile=str(data / "ca.pem"))
        infer, admin = ((data / name).read_text().strip() for name in ("default.key", "admin.key"))
        with (
            _activator(data) as (second, second_health),
            httpx.Client(verify=trust, trust_env=False, timeout=PATIENCE_S) as client,  # a busy disk takes its time
        ):
            urls = [first, second]
            assert _seconds_until(client, urls, infer, 200, PATIENCE_S) is not None
            # One may have begun with what was kept, and is told of nothing yet.
            healths = (first_health, second_health)
            wait(lambda: all(_feed(client, each) == "live" for each in healths), "every activator follows the feed")
            by = {"authorization": f"Bearer {admin}"}

            def make(path: str, body: dict[str, object]) -> tuple[str, str]:
                made = client.post(f"{first}/admin/v1/keys{path}", json=body, headers=by).raise_for_status().json()
                return made["key"]["key_id"], made["secret"]

            took: list[float] = []
            for number in range(7):
                key_id, secret = make("", {"name": f"k{number}", "scopes": ["infer"]})
                assert [_status(client, url, secret) for url in urls] == [200, 200]
                began = time.monotonic()
                told = client.post(f"{first}/admin/v1/keys/{key_id}/revoke", headers=by).raise_for_status().json()
                assert told["told"]
                assert _seconds_until(client, urls, secret, 401, PATIENCE_S) is not None
                took.append(time.monotonic() - began)
            record_property("revocation_s", took)
            print("revoked within", [f"{each * 1000:.1f} ms" for each in took])
            assert statistics.median(took) < WITHIN_S  # one may meet a busy machine

            key_id, old = make("", {"name": "control", "scopes": ["infer"]})
            make(f"/{key_id}/rotate", {"overlap_s": 3600})
            assert _seconds_until(client, urls, old, 401, WITHIN_S) is None
