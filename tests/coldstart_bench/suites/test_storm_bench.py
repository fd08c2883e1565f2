"""Results of a storm: fair finish times, and claims that fail on bad results."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from coldstart_bench.report.bench_report import BenchReport
from coldstart_bench.suites.storm_bench import MissRound, NodeTraffic, StormFigures, fair_finishes, judge, unfairness

FAIR = MissRound(
    3,
    4096,
    1e6,
    ((1.0, 0.95, 0.9), (1.0, 1.0, 0.98)),
    (),
    (NodeTraffic(12288, 12288), NodeTraffic(12288, 12288)),
    NodeTraffic(24576, 12288),
)
PEERED = msgspec.structs.replace(FAIR, store=NodeTraffic(12800, 12288))


def changed(miss: dict[str, Any]) -> StormFigures:
    """Return good figures with these changes."""
    return StormFigures(msgspec.structs.replace(FAIR, **miss), PEERED)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        pytest.param([100], (1.0,), id="one has the line"),
        pytest.param([100, 100], (2.0, 2.0), id="two have half each"),
        pytest.param([100, 300], (2.0, 4.0), id="the longer one has all once the shorter is through"),
        pytest.param([300, 100, 200], (6.0, 3.0, 5.0), id="in any order"),
        pytest.param([], (), id="none"),
    ],
)
def test_fair_finishes(sizes: Sequence[int], want: Sequence[float]) -> None:
    """Processor sharing at 100 bytes a second."""
    assert fair_finishes(sizes, 100.0) == pytest.approx(want)


def test_first_come_first_served_is_unfair() -> None:
    """In arrival order, the first of four equals finishes in a quarter of the fair time."""
    assert unfairness([1.0, 2.0, 3.0, 4.0], [5] * 4) == pytest.approx(0.75)
    assert unfairness([4.0, 4.0, 3.6, 4.0], [5] * 4) == pytest.approx(0.1)


def test_good_figures_pass() -> None:
    assert [verdict.passed for verdict in judge(StormFigures(FAIR, PEERED))] == [True] * 4


@pytest.mark.parametrize(
    ("miss", "claim"),
    [
        pytest.param({"nodes": (NodeTraffic(12800, 12288),)}, "left the store", id="a range left twice"),
        pytest.param({"failures": ("gone",)}, "leases that failed", id="a lease failed"),
        pytest.param({"finished_s": ((0.3, 0.6, 1.0),)}, "fair finish", id="one after the other"),
    ],
)
def test_a_bad_figure_fails(miss: dict[str, Any], claim: str) -> None:
    found = judge(changed(miss))
    assert [verdict.claim for verdict in found if verdict.passed is False and claim in verdict.claim]


def test_unread_bytes_hold_no_claim() -> None:
    """Without any read, the claims are not measured."""
    still = NodeTraffic(0, 0)
    missed = msgspec.structs.replace(FAIR, nodes=(FAIR.nodes[0], still))
    found = judge(StormFigures(missed, msgspec.structs.replace(PEERED, store=still)))
    assert {verdict.claim for verdict in found if verdict.passed is None} == {
        "times that a byte left the store, per node",
        "times that a byte left the store in all, with peers",
    }


def test_peers_that_each_read_the_store_fail() -> None:
    failing = [verdict.claim for verdict in judge(StormFigures(FAIR, FAIR)) if verdict.passed is False]
    assert failing == ["times that a byte left the store in all, with peers"]


@pytest.mark.parametrize(
    ("miss", "passed"),
    [
        pytest.param({}, True, id="all was measured"),
        pytest.param({"finished_s": ((0.3, 0.6, 1.0),)}, True, id="a line that does not hold is printed"),
        pytest.param({"failures": ("gone",)}, False, id="a lease failed"),
    ],
)
def test_the_exit_says_whether_it_was_measured(miss: dict[str, Any], passed: bool) -> None:
    """The exit code needs every requested lease. Claims don't count."""
    found = changed(miss)
    assert BenchReport(found, judge(found), {}, 0.0, None).passed is passed
