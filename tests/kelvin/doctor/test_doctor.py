"""`kelvin doctor` as a command: a good machine fails no check, and planted faults are found with cost and fix."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from controlplane.__main__ import describe_kept_aside
from controlplane.db.database import open_database
from controlplane.ledger.usage_batches import Unreadable
from controlplane.ledger.usage_ledger import keep_aside
from kelvin.doctor import service_checks
from kelvin.doctor.disk_checks import check_disk
from kelvin.doctor.finding_policy import Finding, FindingLevel
from kelvin.doctor.kernel_checks import (
    check_clock,
    check_kernel,
    check_limits,
    check_memory,
    usable_bytes,
    wall_minus_monotonic_s,
)
from kelvin.doctor.secret_checks import check_secrets, is_running
from kelvin.doctor.service_checks import check_services

ROOT = Path(__file__).parents[3]
KEY = "kv-abcdefghijkl-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
LEAST_BYTES = 8 << 20


def doctor(
    data: Path, code: int, *words: str, env: dict[str, str] | None = None, before: Callable[[], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Run the command and return the findings by check. For several of one check, the worst one."""
    command = [sys.executable, "-m", "kelvin.cli.main", "doctor", "--data", str(data), "--read-bytes", str(LEAST_BYTES)]
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
    ascending = sorted(findings, key=lambda finding: list(FindingLevel).index(FindingLevel(finding["level"])))
    return {finding["check"]: finding for finding in ascending}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with valid private keys."""
    tmp_path.chmod(0o700)
    for name in ("admin.key", "default.key"):
        (tmp_path / name).write_text(KEY + "\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.mark.deep
def test_good_machine_has_no_failing_check(data: Path) -> None:
    """Every check reports, and none fails on a good machine. No file is left behind."""
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
def test_every_fault_of_a_bad_machine_is_found(data: Path) -> None:
    """Few descriptors, a misspelt setting, a bad value, a contradiction, an open secret and a weak key are found."""
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
    for check, level, text in (
        ("limit nofile", "fail", "300"),
        ("setting", "warn", "KELVIN_DEVICE_SLOT is no setting"),
        ("service", "fail", "KELVIN_QUEUE_REQUESTS=none: must be a whole number"),
        ("settings contradict", "fail", "KELVIN_BODY_BYTES_IN_ALL"),
        ("secrets", "fail", "admin.key has mode 0644"),
        ("keys", "fail", "default.key has 1 different bytes"),
    ):
        assert found[check]["level"] == level, found[check]
        assert text in found[check]["seen"]
    assert "KELVIN_DEVICE_SLOTS" in found["setting"]["mend"]


@pytest.mark.deep
def test_a_store_that_does_not_answer(data: Path) -> None:
    """The store itself fails, and its settings are fine."""
    url = "s3://bucket/prefix?endpoint=http://127.0.0.1:9&connect_s=1&read_s=1"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    found = doctor(data, 1, "--store", url, env=keys)
    assert found["store"]["level"] == "fail"
    assert found["services"]["level"] == "ok"
    assert "service" not in doctor(data, 0, "--store", (data / "store").as_uri())


@pytest.mark.deep
def test_external_database_is_not_backed_up(data: Path) -> None:
    """A password in the URL is refused and not shown. Backups of an external database aren't Kelvin's task."""
    found = doctor(data, 1, env={"KELVIN_DATABASE": "postgresql://kelvin:hunter2@db.example/kelvin"})
    assert "KELVIN_DATABASE=postgresql://...: must hold no password" in found["service"]["seen"]
    assert found["backups"]["level"] == "note"
    assert "hunter2" not in json.dumps(found)


def test_full_disk_is_reported(data: Path) -> None:
    """With files limited to a megabyte, the probe reports a full disk and leaves no file."""
    script = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from kelvin.doctor.disk_checks import check_disk; print(check_disk(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "can't be written: File too large" in done.stdout
    assert "requests (503) once the spool's room is used" in done.stdout  # until then, requests are served
    assert sorted(path.name for path in data.iterdir()) == ["admin.key", "default.key"]


def test_probe_leaves_the_last_room_to_requests(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe writes only small files on an almost full disk, because the disk still serves requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    almost_full = shutil.disk_usage(data)._replace(free=4 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        found = check_disk(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [finding.check for finding in found] == ["disk sync", "disk space"]
    assert found[1].seen.startswith("4.19 MB of")


def test_checks_see_this_machine(data: Path) -> None:
    """Each check returns plausible values for this machine and removes its files."""
    before_s = wall_minus_monotonic_s()
    found = [
        *check_disk(data / "not" / "there", read_bytes=LEAST_BYTES), *check_memory(), *check_limits(8192),
        *check_kernel(), *check_clock(before_s, data),
    ]  # fmt: skip
    by_name = {finding.check: finding for finding in found}
    assert by_name.keys() >= {
        "disk read", "disk sync", "disk space", "huge pages", "memory", "swap", "limit nofile", "limit nproc",
        "limit memlock", "processor", "kernel", "io_uring", "clock",
    }  # fmt: skip
    reading = by_name["disk read"].seen
    assert reading == "O_DIRECT is refused" or "8.39 MB read" in reading
    assert by_name["kernel"].level is FindingLevel.OK
    assert usable_bytes() > 0
    assert "clock step" not in by_name
    assert sorted(path.name for path in data.iterdir()) == ["admin.key", "default.key"]


def _names(findings: Iterable[Finding]) -> set[str]:
    return {finding.check for finding in findings}


def test_a_clock_that_moved_is_seen(data: Path) -> None:
    """A step during the run is reported, and so is a file from the future, which shows an earlier step."""
    assert "clock step" in _names(check_clock(wall_minus_monotonic_s() - 3600, data))
    assert "clock went back" not in _names(check_clock(wall_minus_monotonic_s(), data))
    os.utime(data / "admin.key", (2**32, 2**32))
    assert "clock went back" in _names(check_clock(wall_minus_monotonic_s(), data))


def test_secrets_are_checked_and_not_shown(data: Path) -> None:
    """Findings have file modes and the number of different bytes, and no secret."""
    (good,) = check_secrets(data)
    assert (good.level, good.seen) == (FindingLevel.OK, "2 private files; keys look random")
    (data / "admin.key").write_text("nothing of the kind")
    (data / "default.key").chmod(0o644)
    data.chmod(0o755)
    assert [finding.seen for finding in check_secrets(data)] == [
        "the data directory has mode 0755", "admin.key holds no key", "default.key has mode 0644",
    ]  # fmt: skip
    (nothing,) = check_secrets(data / "none")
    assert nothing.level is FindingLevel.OK
    assert not is_running(data)


def test_filters_are_checked_only_if_they_are_on(data: Path) -> None:
    """The filters' settings are checked before `kelvin up` only if the filters are on."""
    env = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_LIFELINE_FD": "none"}
    failures = {
        on: "".join(found.seen for found in check_services(env | {"KELVIN_FILTERS": on})) for on in ("on", "off")
    }
    assert "filters: KELVIN_LIFELINE_FD=none" in failures["on"]
    assert "filters:" not in failures["off"]
    assert "activator: KELVIN_LIFELINE_FD=none" in failures["off"]


@pytest.mark.parametrize(
    ("setting", "refused_by"),
    [
        pytest.param("KELVIN_DRAIN_S", "kelvin up", id="a setting of the supervisor"),
        pytest.param("KELVIN_READY_S", "kelvin up", id="a setting of the supervisor's start"),
        pytest.param("KELVIN_STEP_S", "zygote", id="a setting of the zygote"),
    ],
)
def test_bad_setting_is_refused_as_a_start_refuses_it(data: Path, setting: str, refused_by: str) -> None:
    """`kelvin doctor` refuses the setting as `kelvin up` would, even one that no service reads."""
    found = list(check_services({**os.environ, "KELVIN_DATA": str(data), setting: "soon"}))
    failures = [finding.seen for finding in found if finding.level is FindingLevel.FAIL]
    assert [line.partition(": must")[0] for line in failures] == [f"{refused_by}: {setting}=soon"]
    assert "services" not in _names(found)


def test_bad_price_book_is_refused_as_a_start_refuses_it(data: Path) -> None:
    """The control plane's check of settings reads the price book too."""
    book = data / "bad.toml"
    book.write_text("prompt = 0.60\n")
    found = list(check_services({**os.environ, "KELVIN_DATA": str(data), "KELVIN_PRICE_BOOK": str(book)}))
    failures = [finding.seen for finding in found if finding.level is FindingLevel.FAIL]
    assert len(failures) == 1
    assert failures[0].startswith(f"controlplane: KELVIN_PRICE_BOOK={book}: bad.toml: currency")
    assert "services" not in [finding.check for finding in found]


def test_services_are_not_imported_from_the_current_directory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder may have the name of a service."""
    (data / "weightcache").mkdir()
    (data / "weightcache" / "__init__.py").write_text("raise SystemExit('not the cache agent')")
    monkeypatch.chdir(data)
    found = list(check_services({**os.environ, "KELVIN_DATA": str(data)}))
    assert [finding.seen for finding in found if finding.level is FindingLevel.FAIL] == []


def test_service_without_an_answer_is_no_refusal(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports on a busy machine may take longer than the check waits. The warning says nothing about settings."""
    stuck = data / "stuck"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(service_checks, "CHECK_S", 0.0)
    found = list(check_services({**os.environ, "KELVIN_DATA": str(data)}))
    assert [finding.seen for finding in found] == [f"{name}: no answer in 0 s" for name in service_checks.SERVICES]
    assert {finding.level for finding in found} == {FindingLevel.WARN}


def test_records_kept_aside_are_counted(tmp_path: Path) -> None:
    """The control plane's check counts them. Without a ledger, or with none kept aside, it reports nothing."""
    path = tmp_path / "kelvin.db"
    assert describe_kept_aside(path) == ""
    database = open_database(path)
    assert describe_kept_aside(path) == ""
    unreadable = Unreadable(raw=b"?", reason="no JSON", subject="unknown", tenant=None, at_us=1)
    asyncio.run(database.write(lambda connection: keep_aside(connection, [unreadable])))
    database.close()
    found = {finding.check: finding for finding in check_services({**os.environ, "KELVIN_DATA": str(tmp_path)})}
    assert found["usage records"].seen == "1 can't be read or contradict others, and are kept aside"
