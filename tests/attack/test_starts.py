"""All processes of a new installation are killed at bad moments of its first minute, and its terminal hangs up."""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from coldstart_bench.harness.request_outcome import ANSWERED, CUT, RequestEnd
from tests.drills.drill_installation import SERVED, DrillInstallation
from tests.drills.matrix import VictimProcess
from tests.drills.stage_drill import kill
from tests.e2e.tiny_models import make_tiny
from tests.eventually import wait
from tests.process_state import has_ended

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


def _kill_all(installation: DrillInstallation) -> None:
    installation.record_processes()
    kill(installation.all_processes())
    installation.restart()


@contextmanager
def _fresh(data: Path) -> Iterator[DrillInstallation]:
    """An installation in an empty data directory. All its processes are ended after the block."""
    installation = DrillInstallation(data, settings={"KELVIN_SCRUB_S": "0"})
    try:
        yield installation
    finally:
        installation.abandon()


def _serve(installation: DrillInstallation, model: Path) -> None:
    push = installation.push(model, SERVED)
    assert push.outcome() == ANSWERED, push.outputs()
    installation.call_admin("PUT", f"/admin/v1/models/{SERVED}/scale", {"max": 1})


def test_killed_in_its_first_minute(scratch: Path, tiny: Path) -> None:
    """An installation killed before its first request, after it, and during a push, starts again with correct books.

    The push resumes. A request whose activator and replica were killed is billed for at most what was delivered.
    """
    with _fresh(scratch / "killed") as installation:
        installation.start()
        _kill_all(installation)
        _serve(installation, tiny)
        installation.expect_answer()
        _kill_all(installation)
        installation.expect_answer()
        assert installation.settle_bill([]) == []

        with closing(installation.push(make_tiny(scratch / "pushed", "llama", seed=9), "other", rate="64K")) as push:
            wait(lambda: any(path.is_file() for path in (installation.data / "staging").rglob("*")), "the push sends")
            with installation.call(3500) as call:
                call.wait_for(lambda: call.words > 50, "words come")
                _kill_all(installation)
                (ending,) = call.endings()
            assert ending.outcome == CUT
            assert push.outcome() == ANSWERED, push.outputs()
        installation.expect_answer()
        assert installation.settle_bill([RequestEnd(CUT, limit=ending.limit, unread=ending.words)]) == []
        for words in (("billing", "verify"), ("audit", "verify"), ("fsck",)):
            code, out, err = installation.kelvin(*words)
            assert code == 0, f"{words}: {out}{err}"


def test_hangup_drains(scratch: Path, tiny: Path) -> None:
    """SIGHUP, as a dropped ssh session sends it, drains the installation like SIGTERM: a stream is completed."""
    with _fresh(scratch / "hung-up") as installation:
        installation.start()
        _serve(installation, tiny)
        supervisor = installation.process(VictimProcess.SUPERVISOR)
        with installation.call(400) as call:
            call.wait_for(lambda: call.words > 5, "words come")
            for each in (supervisor, *supervisor.children()):  # a terminal signals its whole process group
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGHUP)
            (ending,) = call.endings()
        assert (ending.outcome, ending.words) == (ANSWERED, 400)
        wait(lambda: has_ended(supervisor.pid), "the supervisor ends", 120)
        installation.restart()
        installation.expect_answer()
        assert installation.settle_bill([ending]) == []
