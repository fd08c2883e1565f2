"""Kill all processes of a fresh installation at the worst moments of its first minute, and hang up on it."""

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


def _kill_all(ground: DrillInstallation) -> None:
    ground.note_family()
    kill(ground.everything())
    ground.restart()


@contextmanager
def _fresh(data: Path) -> Iterator[DrillInstallation]:
    """A data directory that nothing lies in; nothing of it runs after the block."""
    ground = DrillInstallation(data, settings={"KELVIN_SCRUB_S": "0"})
    try:
        yield ground
    finally:
        ground.abandon()


def _serve(ground: DrillInstallation, model: Path) -> None:
    push = ground.push(model, SERVED)
    assert push.outcome() == ANSWERED, push.said()
    ground.ask("PUT", f"/admin/v1/models/{SERVED}/scale", {"max": 1})


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

        with closing(ground.push(make_tiny(scratch / "pushed", "llama", seed=9), "other", rate="64K")) as push:
            wait(lambda: any(path.is_file() for path in (ground.data / "staging").rglob("*")), "the push sends")
            with ground.call(3500) as call:
                call.wait_for(lambda: call.words > 50, "words come")
                _kill_all(ground)
                (ending,) = call.endings()
            assert ending.outcome == CUT
            assert push.outcome() == ANSWERED, push.said()
        ground.expect_answer()
        assert ground.settle([RequestEnd(CUT, limit=ending.limit, unread=ending.words)]) == []
        for words in (("billing", "verify"), ("audit", "verify"), ("fsck",)):
            code, out, err = ground.kelvin(*words)
            assert code == 0, f"{words}: {out}{err}"


def test_hangup_drains(scratch: Path, tiny: Path) -> None:
    """SIGHUP, as a dropped ssh session sends it, ends the installation as SIGTERM does: a stream comes to its end."""
    with _fresh(scratch / "hung-up") as ground:
        ground.start()
        _serve(ground, tiny)
        supervisor = ground.process(VictimProcess.SUPERVISOR)
        with ground.call(400) as call:
            call.wait_for(lambda: call.words > 5, "words come")
            for each in (supervisor, *supervisor.children()):  # a terminal tells its whole group
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGHUP)
            (ending,) = call.endings()
        assert (ending.outcome, ending.words) == (ANSWERED, 400)
        wait(lambda: has_ended(supervisor.pid), "the supervisor ends", 120)
        ground.restart()
        ground.expect_answer()
        assert ground.settle([ending]) == []
