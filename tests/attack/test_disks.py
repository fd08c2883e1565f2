"""Full disks, read-only disks and missing objects, in an installation that serves other requests meanwhile."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from coldstart_bench.harness.installation import (
    Installation,
    InstallationFailed,
    KelvinUpProcess,
    free_port,
    run_command,
)
from tests.attack import mount_namespace
from tests.attack.attacker import MIB, SETTINGS, Bystander
from tests.e2e.https_client import ask
from tests.e2e.installation_processes import IMPORTS_TESTS, services
from tests.e2e.tenants import Tenant, default_tenant, make_tenant
from tests.e2e.tiny_models import make_tiny
from tests.eventually import wait

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems"),
]

IDLE_CPU_S: Final = 1.0  # processor time that an idle snapshotter may use in LOOK_S seconds
LOOK_S: Final = 3.0


@pytest.fixture(scope="module")
def up(scratch: Path, tiny: Path) -> Iterator[Installation]:
    """An installation on two small tmpfs disks in a mount namespace. Its data path leads through /proc/PID/root."""
    data, port = scratch / "disks", free_port()
    sizes = {mount_namespace.DATA_BYTES: str(96 * MIB), mount_namespace.STAGING_BYTES: str(4 * MIB)}
    settings = {**SETTINGS, **IMPORTS_TESTS, **sizes, "KELVIN_NVME_BYTES": str(8 * MIB)}
    with KelvinUpProcess(data, port, settings, program="tests.attack.mount_namespace") as process:
        assert "ready" in process.ready_line(), process.error_output()
        up = Installation(Path(f"/proc/{process.pid}/root{data}"), port, process.pid)
        default_tenant(up).push(tiny)
        yield up
        up.close()


@pytest.fixture
def tenant(up: Installation) -> Iterator[Tenant]:
    """A tenant whose model answers before and after the test."""
    tenant = default_tenant(up)
    assert tenant.complete().status == 200
    yield tenant
    assert tenant.complete().status == 200


def _mount(up: Installation, options: str) -> None:
    staging = f"{str(up.data).partition('/root')[2]}/staging"
    command = ["nsenter", "-t", str(up.pid), "-m", "mount", "-o", f"remount,{options}", staging]
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def _full(directory: Path, spare_bytes: int = 0) -> Iterator[None]:
    """Fill the disk of the directory until the block ends."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (left := os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize - spare_bytes) > 0:
            file.write(bytes(min(left, MIB)))
    try:
        yield
    finally:
        filler.unlink()


def _cpu_s(up: Installation) -> float:
    """Return the processor seconds that the snapshotter has used so far."""
    times = services(up)["snapshotter"].cpu_times()
    return float(times.user + times.system)


def _forget(up: Installation, owner: Tenant) -> None:
    """Scale the tenant's model to zero, and drop its bytes from memory and from the NVMe cache."""
    owner.run("stop", "m")
    wait(lambda: not any(each["replicas"] for each in _versions(owner)), "the model is at zero")
    for path in (up.data / "cache" / owner.name).rglob("*"):
        if path.is_file():
            path.unlink()
    before = services(up)["weightcache"]
    before.kill()
    wait(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE, "the cache agent is gone")
    wait(lambda: ask(up, "GET", "/admin/v1/cache", up.data / "admin.key").status == 200, "a new cache agent runs")


def _rests(up: Installation) -> None:
    """Wait until the snapshotter is idle."""

    def is_at_rest() -> bool:
        before = _cpu_s(up)
        time.sleep(LOOK_S)  # processor time is measured over this time
        return _cpu_s(up) - before < IDLE_CPU_S

    wait(is_at_rest, "the snapshotter rests")


def test_read_only_staging(up: Installation, tenant: Tenant, scratch: Path) -> None:
    """A push fails without a traceback while staging is read-only, and leaves the snapshotter idle.

    Requests are answered meanwhile, and the push succeeds once staging is writable.
    """
    directory = make_tiny(scratch / "read-only", "llama", seed=11)
    _mount(up, "ro")
    try:
        with Bystander(tenant.complete) as bystander:
            answer = _push_briefly(tenant, directory)
            assert answer != 0
            _rests(up)
        assert bystander.failures == []
    finally:
        _mount(up, "rw")
    assert tenant.push(directory, "other")["exit"] == 0


def _push_briefly(tenant: Tenant, directory: Path) -> int | None:
    """Return the exit code of a push, or None if it still retried after 20 s. A push may retry for two minutes."""
    try:
        code, _, err = run_command(tenant.up.data, "push", str(directory), "--name", "other", limit_s=20)
    except InstallationFailed:
        return None
    assert "Traceback" not in err, err
    return code


def test_full_staging(up: Installation, tenant: Tenant, scratch: Path) -> None:
    """A push is refused while staging has no room, and succeeds afterwards. Requests are answered meanwhile."""
    directory = make_tiny(scratch / "full", "llama", seed=12)
    with _full(up.data / "staging"), Bystander(tenant.complete) as bystander:
        answer = _push_briefly(tenant, directory)
        assert answer != 0
        _rests(up)
    assert bystander.failures == []
    assert tenant.push(directory, "other")["exit"] == 0


def test_key_creation_on_a_full_disk(up: Installation, tenant: Tenant) -> None:
    """On a full disk, a new key is refused with its reason, never `internal`. Once there is room, one key is made."""
    admin = up.data / "admin.key"
    body = {"name": "on-a-full-disk", "scopes": ["infer"]}
    refused = []
    with _full(up.data):
        for _ in range(400):  # the database and its log have free pages of their own at first
            answer = ask(up, "POST", "/admin/v1/keys", admin, body)
            if answer.status != 201:
                refused.append(answer)
                break
    assert refused, "four hundred keys fit a full disk"
    assert refused[0].json["code"] in ("capacity_exceeded", "unavailable"), refused[0].raw
    wait(lambda: ask(up, "POST", "/admin/v1/keys", admin, body | {"name": "after"}).status == 201, "a key is made")
    keys = ask(up, "GET", "/admin/v1/keys", admin).json["keys"]
    assert [key["name"] for key in keys].count("after") == 1


def test_push_on_a_full_store(up: Installation, tenant: Tenant, scratch: Path) -> None:
    """A push into a full store is refused with its reason, and succeeds once there is room. Requests are answered."""
    directory = make_tiny(scratch / "no-room", "llama", seed=15)
    with _full(up.data), Bystander(tenant.complete) as bystander:
        answer = tenant.push(directory, "other")
        assert answer["exit"] in (1, 4), answer
        named = answer["error"]["code"] == "start_failed" and "is full" in answer["error"]["message"]  # no job starts
        assert named or answer["error"]["code"] in ("capacity_exceeded", "unavailable", "overloaded"), answer
        bystander.wait_for(3)
    assert bystander.failures == []
    assert tenant.push(directory, "other")["exit"] == 0


def test_lost_manifest(up: Installation, scratch: Path) -> None:
    """A version whose manifest is gone fails as such, never as an unknown model, and `kelvin fsck` names it.

    Another model answers meanwhile. The version answers again once the manifest is back.
    """
    owner = make_tenant(up, "loser", scratch)
    directory = make_tiny(scratch / "lost", "llama", seed=13)
    version = owner.push(directory)["version"]
    assert owner.complete().status == 200
    (manifest,) = [path for path in (up.data / "store").rglob(version) if path.parent.name == "manifests"]
    content = manifest.read_bytes()
    _forget(up, owner)
    manifest.unlink()
    try:
        with Bystander(default_tenant(up).complete) as bystander:
            answer = owner.complete()
            assert answer.json["error"]["code"] not in ("not_found", "model_not_found", "internal"), answer.raw
            code, out, err = owner.kelvin("fsck")
            assert code != 0
            assert version[:12] in out + err
            assert "Traceback" not in err
        assert bystander.failures == []
    finally:
        manifest.write_bytes(content)
    wait(lambda: owner.complete().status == 200, "it answers again", 90)


def _versions(owner: Tenant) -> list[dict[str, list[object]]]:
    """Return the versions of the tenant's model from the admin API."""
    found: list[dict[str, list[object]]] = ask(owner.up, "GET", "/admin/v1/models/m", owner.admin).json["versions"]
    return found


def test_start_that_fails_says_why(up: Installation, scratch: Path) -> None:
    """A start that fails for missing weights says `chunk_missing` to its caller and in the admin API."""
    owner = make_tenant(up, "weightless", scratch)
    assert owner.push(make_tiny(scratch / "weightless", "llama", seed=14))["exit"] == 0
    _forget(up, owner)
    for path in (up.data / "store" / owner.name).rglob("packs/*"):
        path.unlink()
    with Bystander(default_tenant(up).complete) as bystander:
        answers = [owner.complete(max_tokens=1) for _ in range(3)]
        codes = {answer.json["error"]["code"] for answer in answers}
        assert not codes & {"internal", "model_not_found", "unavailable"}, answers[0].raw
        assert "chunk_missing" in codes, answers[0].raw
        shown = ask(up, "GET", "/admin/v1/models/m", owner.admin).raw.decode()
        assert "chunk_missing" in shown, shown
    assert bystander.failures == []
