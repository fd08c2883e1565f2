"""`kelvin timeline`: what it prints of a request besides the drawing, which test_waterfall.py covers."""

import msgspec
from click.testing import CliRunner

from contracts.control import StartProblem, TimelineAnswer
from contracts.timeline import Stage, Stamp
from kelvin.timeline import timeline_command
from tests.kelvin.doors import answering

WARM = TimelineAnswer(request_id="r1", model="m", version="a" * 64, cold=True, stamps=(Stamp(Stage.ROUTED, 1_000),))


def _printed(answer: TimelineAnswer) -> str:
    done = CliRunner().invoke(timeline_command, ["r1"], obj=answering(answer))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_timeline_says_why_no_replica_came() -> None:
    """With reason and message, below the drawing. A request whose replica came has no such line."""
    problem = StartProblem("missing_secret", "the namespace kelvin-acme lacks the secret kelvin-store", None)
    text = _printed(msgspec.structs.replace(WARM, start_problem=problem))
    assert text.splitlines()[-1] == (
        "no replica came (missing_secret): the namespace kelvin-acme lacks the secret kelvin-store"
    )
    assert "no replica came" not in _printed(WARM)


def test_timeline_calls_a_request_warm_only_if_a_replica_was_given_it() -> None:
    """A request that was refused before that was neither cold nor warm."""
    refused = msgspec.structs.replace(WARM, cold=False)
    assert _printed(refused).splitlines()[0].endswith("  reached no replica")
    answered = msgspec.structs.replace(refused, stamps=(*refused.stamps, Stamp(Stage.DISPATCHED, 2_000)))
    assert _printed(answered).splitlines()[0].endswith("  warm")
