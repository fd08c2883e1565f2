"""`kelvin timeline`: its output for a request, the waterfall of a start, and the floor beside it."""

from pathlib import Path

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from kelvin.cli.operations.timeline_command import BadReport, draw_waterfall, read_floor_us, timeline_command
from kelvin.contracts.serving.control_messages import StartProblem, TimelineAnswer
from kelvin.contracts.timeline import Stage, Stamp
from tests.kelvin.cli_targets import installation_answering

WARM = TimelineAnswer(request_id="r1", model="m", version="a" * 64, cold=True, stamps=(Stamp(Stage.ROUTED, 1_000),))


def _printed(answer: TimelineAnswer) -> str:
    done = CliRunner().invoke(timeline_command, ["r1"], obj=installation_answering(answer))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_timeline_says_why_no_replica_came() -> None:
    """Reason and message follow the drawing. A request that got a replica has no such line."""
    problem = StartProblem("missing_secret", "the namespace kelvin-acme lacks the secret kelvin-store", None)
    text = _printed(msgspec.structs.replace(WARM, start_problem=problem))
    assert text.splitlines()[-1] == (
        "no replica came (missing_secret): the namespace kelvin-acme lacks the secret kelvin-store"
    )
    assert "no replica came" not in _printed(WARM)


def test_request_without_a_replica_is_not_called_warm() -> None:
    """A request that was refused earlier was neither cold nor warm."""
    refused = msgspec.structs.replace(WARM, cold=False)
    assert _printed(refused).splitlines()[0].endswith("  reached no replica")
    answered = msgspec.structs.replace(refused, stamps=(*refused.stamps, Stamp(Stage.DISPATCHED, 2_000)))
    assert _printed(answered).splitlines()[0].endswith("  warm")


def test_each_bar_begins_where_the_one_before_ended() -> None:
    """The bars fill the time since arrival. Durations and end times are printed."""
    drawn = draw_waterfall([Stamp(Stage.ROUTED, 1_000), Stamp(Stage.BOUND, 4_000)], width=8)
    first, second = drawn.splitlines()
    assert "│██      │" in first
    assert "│  ██████│" in second
    assert second.endswith("3.0 ms       4.0")


def test_the_floor_is_drawn_beside_it() -> None:
    """A floor longer than the start widens the drawing."""
    drawn = draw_waterfall([Stamp(Stage.ROUTED, 1_000)], floor_us=2_000, width=8)
    assert drawn.splitlines()[-1].lstrip().startswith("floor │░░░░░░░░│")


def test_the_picture_ends_with_the_first_token() -> None:
    """The time after the first token is a line of text, so that a long response doesn't shrink the start."""
    drawn = draw_waterfall([Stamp(Stage.FIRST_TOKEN, 1_000), Stamp(Stage.DONE, 901_000)], width=8)
    first, last = drawn.splitlines()
    assert "│████████│" in first
    assert last.split() == ["done", "900.0", "ms", "after", "that"]


def test_timeline_without_stamps_says_so() -> None:
    assert draw_waterfall([]) == "(no stages were stamped)"


ROWS = [
    {"size_bytes": 500_000_000, "tier": "host", "system": "floor", "median_s": 0.07},
    {"size_bytes": 500_000_000, "tier": "nvme", "system": "floor", "median_s": 0.2},
    {"size_bytes": 2_000_000_000, "tier": "host", "system": "floor", "median_s": 0.2},
    {"size_bytes": 500_000_000, "tier": "host", "system": "kelvin", "median_s": 0.1},
]


@pytest.mark.parametrize(
    ("weight_bytes", "want"),
    [
        pytest.param(491_000_000, 70_000, id="the nearest size"),
        pytest.param(2_100_000_000, 200_000, id="the next one up"),
        pytest.param(1_000_000_000, None, id="no size is near"),
        pytest.param(0, None, id="an unknown size has none"),
    ],
)
def test_floor_is_read_from_host_tier_rows(tmp_path: Path, weight_bytes: int, want: int | None) -> None:
    """Only the rows of system `floor` and tier `host` count."""
    report = tmp_path / "bench.json"
    report.write_bytes(msgspec.json.encode({"rows": ROWS, "machine": {}, "commit": None}))
    assert read_floor_us(report, weight_bytes) == want


def test_timeline_without_a_floor_is_printed(tmp_path: Path) -> None:
    """The key may lack the scope to read the model's size."""
    report = tmp_path / "bench.json"
    report.write_bytes(msgspec.json.encode({"rows": ROWS}))
    refusal = httpx.Response(403, json={"error": {"message": "no"}})
    done = CliRunner().invoke(
        timeline_command, ["r1", "--floor", str(report)], obj=installation_answering(WARM, refusal)
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].startswith("r1  m@")
    assert done.stdout.splitlines()[-1].startswith("no floor: the size of the model is told to keys with the scope")


def test_invalid_floor_report_is_named(tmp_path: Path) -> None:
    """The error names the file and the rule."""
    (tmp_path / "x.json").write_text('{"rows": 3}')
    with pytest.raises(BadReport, match="is not a report"):
        read_floor_us(tmp_path / "x.json", 1)
    with pytest.raises(BadReport, match="No such file"):
        read_floor_us(tmp_path / "y.json", 1)
