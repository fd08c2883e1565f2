"""A stage is stamped once, and stages are ordered by time."""

from kelvin.contracts.timeline import Stage, StageSpan, Stamp, Timeline


def test_first_stamp_of_a_stage_is_kept() -> None:
    """A retry does not change the time of a stage that was reached before."""
    line = Timeline(1_000)
    line.stamp(Stage.ROUTED, 1_500)
    line.stamp(Stage.ROUTED, 9_000)
    assert line.stamps() == (Stamp(Stage.ROUTED, 500),)


def test_remote_spans_are_shifted_to_the_start_of_the_call() -> None:
    """Spans of another process are added to the caller's timeline from the time of the call."""
    line = Timeline(1_000)
    line.stamp(Stage.POKED, 2_000)
    line.merge_spans([StageSpan(Stage.BOUND, 700), StageSpan(Stage.LEASED, 300)], call_began_us=2_500)
    assert [stamp.stage for stamp in line.stamps()] == [Stage.POKED, Stage.LEASED, Stage.BOUND]
    assert line.stamps()[-1].at_us == 2_200


def test_server_timing_gives_each_stage_its_own_duration() -> None:
    """A duration counts from the previous stage, in milliseconds (W3C Server-Timing)."""
    line = Timeline(0)
    line.stamp(Stage.ROUTED, 1_500)
    line.stamp(Stage.DISPATCHED, 4_000)
    assert line.server_timing() == "routed;dur=1.50, dispatched;dur=2.50"
