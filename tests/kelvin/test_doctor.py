"""`kelvin doctor` from outside: a good place fails nothing; what is planted is found, with its cost and its mend."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.check import describe_kept_aside
from controlplane.ledger import keep_aside
from controlplane.store import open_database
from controlplane.usage_batches import Unreadable
from kelvin.policy.findings import Level
from kelvin.probes import services
from kelvin.probes.disk import look_at_disk
from kelvin.probes.guards import is_running, look_at_secrets
from kelvin.probes.kernel import look_at_clock, look_at_kernel, look_at_limits, wall_minus_monotonic_s
from kelvin.probes.memory import look_at_memory
from kelvin.probes.services import ask_services

ROOT = Path(__file__).parents[2]
KEY = "kv-abcdefghijkl-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
LEAST_BYTES = 8 << 20


def doctor(
    data: Path, code: int, *words: str, env: dict[str, str] | None = None, before: Callable[[], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Findings by their check; of several of one check one of the worst."""
    command = [sys.executable, "-m", "kelvin.main", "doctor", "--data", str(data), "--read-bytes", str(LEAST_BYTES)]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KELVIN_")}
    done = subprocess.run(
        [*command, "--json", *words],
        cwd=ROOT,
        env={**ours, **(env or {})},
        preexec_fn=before,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    ascending = sorted(findings, key=lambda finding: list(Level).index(Level(finding["level"])))
    return {finding["check"]: finding for finding in ascending}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with keys as they should be."""
    tmp_path.chmod(0o700)
    for name in ("admin.key", "default.key"):
        (tmp_path / name).write_text(KEY + "\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.mark.deep
def test_a_good_place(data: Path) -> None:
    """Every check speaks, and none fails but what this machine lacks; nothing is left behind."""
    before = sorted(path.name for path in data.iterdir())
    found = doctor(data, 0, env={"KELVIN_BACKUP_S": "240"})
    assert {
        "disk read", "disk sync", "disk space", "huge pages", "memory", "swap", "limit nofile", "limit nproc",
        "limit memlock", "processor", "kernel", "io_uring", "GPU", "CRIU", "settings", "settings agree", "services",
        "store", "secrets", "backups", "clock",
    } <= found.keys()  # fmt: skip
    assert sorted(path.name for path in data.iterdir()) == before
    assert all(finding["mend"] for finding in found.values() if finding["level"] in ("warn", "fail"))


@pytest.mark.deep
def test_a_bad_place(data: Path) -> None:
    """All of it at once: descriptors, a misspelt name, a bad value, a contradiction, an open secret, a weak one."""
    (data / "admin.key").chmod(0o644)
    (data / "default.key").write_text("kv-abcdefghijkl-" + "A" * 43)
    found = doctor(
        data,
        1,
        before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)),
        env={
            "KELVIN_DEVICE_SLOT": "4",
            "KELVIN_QUEUE_REQUESTS": "none",
            "KELVIN_BODY_BYTES": str(1 << 30),
            "KELVIN_BACKUP": str(data / "backups"),
        },
    )
    for check, level, says in (
        ("limit nofile", "fail", "300"),
        ("setting", "warn", "KELVIN_DEVICE_SLOT is no setting"),
        ("service", "fail", "KELVIN_QUEUE_REQUESTS=none: must be a whole number"),
        ("settings contradict", "fail", "KELVIN_BODY_BYTES_IN_ALL"),
        ("secrets", "fail", "admin.key has mode 0644"),
        ("keys", "fail", "default.key has 1 different bytes"),
    ):
        assert found[check]["level"] == level, found[check]
        assert says in found[check]["seen"]
    assert "KELVIN_DEVICE_SLOTS" in found["setting"]["mend"]


@pytest.mark.deep
def test_a_store_that_does_not_answer(data: Path) -> None:
    """Asked of the snapshotter; the settings themselves are good."""
    url = "s3://bucket/prefix?endpoint=http://127.0.0.1:9&connect_s=1&read_s=1"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    found = doctor(data, 1, "--store", url, env=keys)
    assert found["store"]["level"] == "fail"
    assert found["services"]["level"] == "ok"
    assert "service" not in doctor(data, 0, "--store", (data / "store").as_uri())


@pytest.mark.deep
def test_a_database_elsewhere(data: Path) -> None:
    """A password in its URL is refused and not told; what lies there is not ours to back up."""
    found = doctor(data, 1, env={"KELVIN_DATABASE": "postgresql://kelvin:hunter2@db.example/kelvin"})
    assert "KELVIN_DATABASE=postgresql://...: must hold no password" in found["service"]["seen"]
    assert found["backups"]["level"] == "note"
    assert "hunter2" not in json.dumps(found)


def test_a_full_disk_is_told(data: Path) -> None:
    """Files of at most a megabyte stand in for it: the probe says so, and leaves nothing."""
    script = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from kelvin.probes.disk import look_at_disk; print(look_at_disk(Path(sys.argv[1])).fault)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "can't be written: File too large" in done.stdout
    assert sorted(path.name for path in data.iterdir()) == ["admin.key", "default.key"]


def test_probe_leaves_the_last_room_to_requests(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with a few megabytes left still serves: nothing as large is written there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    almost_full = shutil.disk_usage(data)._replace(free=4 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        disk = look_at_disk(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (disk.fault, disk.read_bytes, disk.free_bytes) == (None, 0, 4 << 20)


def test_probes_see_this_machine(data: Path) -> None:
    """Figures of a kind that a machine has; the probe's files are gone."""
    disk = look_at_disk(data / "not" / "there", read_bytes=LEAST_BYTES)
    assert disk.fault is None
    assert disk.read_bytes_s is None or (disk.read_bytes_s > 0 and disk.read_bytes == LEAST_BYTES)
    assert 0 < disk.sync_p50_s <= disk.sync_max_s
    memory = look_at_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert memory.collapsed is not bool(memory.collapse_fault)
    assert look_at_limits().cores >= 1
    assert look_at_kernel().release > (5, 0)
    clock = look_at_clock(wall_minus_monotonic_s(), data)
    assert abs(clock.stepped_s) < 60
    assert look_at_clock(wall_minus_monotonic_s() - 3600, data).stepped_s > 3000
    assert sorted(path.name for path in data.iterdir()) == ["admin.key", "default.key"]


def test_a_file_from_the_future_is_seen(data: Path) -> None:
    """The clock went back since it was written."""
    ahead = wall_minus_monotonic_s()
    os.utime(data / "admin.key", (2**32, 2**32))
    assert look_at_clock(ahead, data).ahead_s > 3600


def test_secrets_are_looked_at_and_not_told(data: Path) -> None:
    """Modes and how many different bytes; not one of these."""
    files, mode = look_at_secrets(data)
    assert mode == 0o700
    assert [(file.name, file.mode, file.different) for file in files] == [
        ("admin.key", 0o600, 32),
        ("default.key", 0o600, 32),
    ]
    (data / "admin.key").write_text("nothing of the kind")
    assert look_at_secrets(data)[0][0].is_key_text is False
    assert look_at_secrets(data / "none") == ([], None)
    assert not is_running(data)


def test_filters_are_asked_where_they_are_on(data: Path) -> None:
    """What they don't take is told before `kelvin up` is; where they are off nobody asks them."""
    env = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_LIFELINE_FD": "none"}
    told = {on: "".join(found.seen for found in ask_services(env | {"KELVIN_FILTERS": on})) for on in ("on", "off")}
    assert "filters: KELVIN_LIFELINE_FD=none" in told["on"]
    assert "filters:" not in told["off"]
    assert "activator: KELVIN_LIFELINE_FD=none" in told["off"]


def test_service_without_an_answer_is_no_refusal(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine imports take longer than the check waits: that is uncertain, and says nothing of settings."""
    monkeypatch.setattr(services, "CHECK_S", 0.0)
    found = list(ask_services({**os.environ, "KELVIN_DATA": str(data)}))
    assert [finding.seen for finding in found] == [f"{name}: no answer in 0 s" for name in services.SERVICES]
    assert {finding.level for finding in found} == {Level.WARN}


def test_records_kept_aside_are_counted(tmp_path: Path) -> None:
    """The control plane's check tells of them; without a ledger, and with none, it says nothing."""
    path = tmp_path / "kelvin.db"
    assert describe_kept_aside(path) == ""
    database = open_database(path)
    assert describe_kept_aside(path) == ""
    unreadable = Unreadable(raw=b"?", reason="no JSON", subject="unknown", tenant=None, at_us=1)
    asyncio.run(database.write(lambda connection: keep_aside(connection, [unreadable])))
    database.close()
    found = {finding.check: finding for finding in ask_services({**os.environ, "KELVIN_DATA": str(tmp_path)})}
    assert found["usage records"].seen == "1 can't be read or contradict others, and are kept aside"
