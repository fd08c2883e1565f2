"""Disks that are full or read-only, and objects that are gone, under an installation that others use."""

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

IDLE_CPU_S: Final = 1.0  # of the snapshotter, in so many seconds:
LOOK_S: Final = 3.0


@pytest.fixture(scope="module")
def up(scratch: Path, tiny: Path) -> Iterator[Installation]:
    """An installation on two small disks that nobody else sees; its data directory by the way of its own process."""
    data, port = scratch / "disks", free_port()
    sizes = {mount_namespace.DATA_BYTES: str(96 * MIB), mount_namespace.STAGING_BYTES: str(4 * MIB)}
    settings = {**SETTINGS, **IMPORTS_TESTS, **sizes, "KELVIN_NVME_BYTES": str(8 * MIB)}
    with KelvinUpProcess(data, port, settings, program="tests.attack.mount_namespace") as process:
        assert "ready" in process.ready_line(), process.said()
        up = Installation(Path(f"/proc/{process.pid}/root{data}"), port, process.pid)
        default_tenant(up).push(tiny)
        yield up
        up.close()


@pytest.fixture
def tenant(up: Installation) -> Iterator[Tenant]:
    """Who has a model that answers, and goes on to."""
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
    """Until the block ends there is no room on the disk of that directory."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (left := os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize - spare_bytes) > 0:
            file.write(bytes(min(left, MIB)))
    try:
        yield
    finally:
        filler.unlink()


def _cpu_s(up: Installation) -> float:
    """Of the snapshotter, so far."""
    times = services(up)["snapshotter"].cpu_times()
    return float(times.user + times.system)


def _forget(up: Installation, owner: Tenant) -> None:
    """Take the tenant's model to zero, and its bytes out of memory and of the cache's disk."""
    owner.run("stop", "m")
    wait(lambda: not any(each["replicas"] for each in _versions(owner)), "it is at zero")
    for path in (up.data / "cache" / owner.name).rglob("*"):
        if path.is_file():
            path.unlink()
    before = services(up)["weightcache"]
    before.kill()
    wait(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE, "the cache agent is gone")
    wait(lambda: ask(up, "GET", "/admin/v1/cache", up.data / "admin.key").status == 200, "another one is there")


def _rests(up: Installation) -> None:
    """The snapshotter does nothing any more."""

    def is_at_rest() -> bool:
        before = _cpu_s(up)
        time.sleep(LOOK_S)  # processor time is measured over this time
        return _cpu_s(up) - before < IDLE_CPU_S

    wait(is_at_rest, "the snapshotter rests")


def test_read_only_staging(up: Installation, tenant: Tenant, scratch: Path) -> None:
    """Pushes while staging can't be written end with a sentence, and leave no loop that burns a core; requests are
    answered. The same push succeeds once it can.
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
    """The exit code of a push that its caller gives up on; a push goes on for two minutes where it may help."""
    try:
        code, _, err = run_command(tenant.up.data, "push", str(directory), "--name", "other", limit_s=20)
    except InstallationFailed:
        return None
    assert "Traceback" not in err, err
    return code


def test_full_staging(up: Installation, tenant: Tenant, scratch: Path) -> None:
    """A push for which staging has no room is refused by name; requests are answered; with room it succeeds."""
    directory = make_tiny(scratch / "full", "llama", seed=12)
    with _full(up.data / "staging"), Bystander(tenant.complete) as bystander:
        answer = _push_briefly(tenant, directory)
        assert answer != 0
        _rests(up)
    assert bystander.failures == []
    assert tenant.push(directory, "other")["exit"] == 0


def test_key_creation_on_a_full_disk(up: Installation, tenant: Tenant) -> None:
    """Nothing can be written: keys are refused by name until there is room again, never `internal`; then one is made,
    and there is one of its name.
    """
    admin = up.data / "admin.key"
    body = {"name": "on-a-full-disk", "scopes": ["infer"]}
    refused = []
    with _full(up.data):
        for _ in range(400):  # the database and its log have pages of their own that are free at first
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
    """The store has no room for a version: the push is refused by name, requests are answered, and the same push
    succeeds once there is room.
    """
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
    """A version's manifest is gone from the store: its caller is told that it is missing, `kelvin fsck` names it, and
    nobody says that there is no such model. Another model answers; with the manifest back it answers, too.
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
    """What the admin API says of the versions of the tenant's model."""
    found: list[dict[str, list[object]]] = ask(owner.up, "GET", "/admin/v1/models/m", owner.admin).json["versions"]
    return found


def test_start_that_fails_says_why(up: Installation, scratch: Path) -> None:
    """The weights of a version are gone from every tier: its caller and the admin API say which failure it is."""
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
        told = ask(up, "GET", "/admin/v1/models/m", owner.admin).raw.decode()
        assert "chunk_missing" in told, told
    assert bystander.failures == []
