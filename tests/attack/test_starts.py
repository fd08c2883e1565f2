"""Kill a fresh installation at each stage of its first seconds, fill its directories with strangers, hang up on it."""

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from coldstart_bench.endings import ANSWERED, CUT, Ending
from tests.attack.models import make_tiny
from tests.attack.outside import ROOT, SETTINGS, kelvin
from tests.drills.ground import SERVED, Ground
from tests.drills.matrix import Process
from tests.eventually import wait
from tests.stopping import has_ended

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

# Files of a data directory that never held anything, in the order in which a first start makes them.
STAGES: Final = ("kelvin.db", "spool", "run/control.sock")
LISTED: Final = (
    "", "spool", "spool/*", "cache", "cache/*", "staging", "run", "run/meters", "store", "store/*", "store/*/*", "logs",
    "tls", "trust",
)  # fmt: skip


def _kill(process: psutil.Process) -> None:
    """SIGKILL to it and all below it, at once."""
    everybody = [process, *process.children(recursive=True)]
    for each in everybody:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGSTOP)  # nobody restarts anybody meanwhile
    for each in everybody:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _kill_all(ground: Ground) -> None:
    ground.note_family()
    _kill(ground.process(Process.SUPERVISOR))
    ground.restart()


@contextmanager
def _fresh(data: Path) -> Iterator[Ground]:
    """A data directory that nothing lies in; nothing of it runs after the block."""
    ground = Ground(data, settings={"KELVIN_SCRUB_S": "0"})
    try:
        yield ground
    finally:
        ground.abandon()


def _serve(ground: Ground, model: Path) -> None:
    push = ground.push(model, SERVED)
    assert push.outcome() == ANSWERED, push.said()
    ground.ask("PUT", f"/admin/v1/models/{SERVED}/scale", {"max": 1})


def test_killed_before_it_was_ready(scratch: Path) -> None:
    """SIGKILL to all processes while a first start makes database, spool and sockets: the next start is ready."""
    with _fresh(scratch / "never-ready") as ground:
        for stage in STAGES:
            _start_until(ground, stage)
        ground.start()
        assert ground.ask("GET", "/admin/v1/models") == {"models": []}


def _start_until(ground: Ground, stage: str) -> None:
    words = ["-m", "kelvin.main", "up", "--data", str(ground.data), "--port", str(ground.port)]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env={**SETTINGS, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait((ground.data / stage).exists, f"a start makes {stage}")
    finally:
        _kill(psutil.Process(process.pid))
        process.wait()


def test_killed_in_its_first_minute(scratch: Path, tiny: Path) -> None:
    """SIGKILL to everything before the first request, after one, and during a push with a request under way.

    Each time it starts again, the push is taken up, and the bill has what the callers counted. Of the request whose
    door and replica were both killed it has no more than came.
    """
    with _fresh(scratch / "killed") as ground:
        ground.start()
        _kill_all(ground)
        _serve(ground, tiny)
        ground.expect_answer()
        _kill_all(ground)
        ground.expect_answer()
        assert ground.settle([]) == []

        with closing(ground.push(make_tiny(scratch / "pushed", seed=9), "other", rate="64K")) as push:
            wait(lambda: any(path.is_file() for path in (ground.data / "staging").rglob("*")), "the push sends")
            with ground.call(3500) as call:
                call.wait_for(lambda: call.words > 50, "words come")
                _kill_all(ground)
                (ending,) = call.endings()
            assert ending.outcome == CUT
            assert push.outcome() == ANSWERED, push.said()
        ground.expect_answer()
        assert ground.settle([Ending(CUT, limit=ending.limit, unread=ending.words)]) == []
        for words in (("billing", "verify"), ("audit", "verify"), ("fsck",)):
            code, out, err = kelvin(ground.data, *words)
            assert code == 0, f"{words}: {out}{err}"


@pytest.fixture(scope="module")
def disturbed(scratch: Path, tiny: Path) -> Iterator[Ground]:
    """An installation that was stopped, got strangers into every directory and the mode 0755, and started again."""
    with _fresh(scratch / "disturbed") as ground:
        ground.start()
        _serve(ground, tiny)
        ground.expect_answer()
        ground.stop()
        _plant(ground.data)
        ground.data.chmod(0o755)
        ground.start()
        yield ground


def _plant(data: Path) -> None:
    for pattern in LISTED:
        for directory in [data] if not pattern else list(data.glob(pattern)):
            if not directory.is_dir():
                continue
            (directory / "lost+found").mkdir(exist_ok=True)
            (directory / "lost+found" / "#12").write_bytes(b"x")
            (directory / "a stray file").write_bytes(b"stray")
            (directory / "a" / "b" / "c").mkdir(parents=True, exist_ok=True)
            (directory / "a" / "b" / "c" / "d").touch()


def test_strangers_in_every_directory(disturbed: Ground) -> None:
    """`lost+found`, a stray file and four path segments in each directory that is listed: a start, a request, a push
    of the same model, collection, verification and the bill are what they were.
    """
    disturbed.expect_answer()
    assert disturbed.settle([]) == []
    for words in (("collect", "--run"), ("billing", "verify"), ("billing", "reconcile"), ("models",), ("status",)):
        code, out, err = kelvin(disturbed.data, *words)
        assert code == 0, f"{words}: {out}{err}"
    disturbed.expect_answer()


def test_data_directory_is_closed_to_others(disturbed: Ground) -> None:
    """A data directory of mode 0755 is its owner's alone after the start."""
    assert stat.S_IMODE(disturbed.data.stat().st_mode) == 0o700


def test_hangup_drains(disturbed: Ground) -> None:
    """SIGHUP, as a dropped ssh session sends it, ends the installation as SIGTERM does: a stream comes to its end."""
    supervisor = disturbed.process(Process.SUPERVISOR)
    with disturbed.call(400) as call:
        call.wait_for(lambda: call.words > 5, "words come")
        for each in (supervisor, *supervisor.children()):  # a terminal tells its whole group
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGHUP)
        (ending,) = call.endings()
    assert (ending.outcome, ending.words) == (ANSWERED, 400)
    wait(lambda: has_ended(supervisor.pid), "the supervisor ends", 120)
    disturbed.restart()
    disturbed.expect_answer()
    assert disturbed.settle([ending]) == []
