"""Results of `kelvin bench front`: systems are compared within a round, and each claim can fail."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from coldstart_bench.harness import front_tools
from coldstart_bench.harness.front_tools import LITELLM, RAY, LoadSample
from coldstart_bench.report.bench_report import BenchReport
from coldstart_bench.suites import front_bench
from coldstart_bench.suites.front_bench import (
    KELVIN,
    NGINX,
    UPSTREAM,
    FrontFigures,
    FrontRow,
    StreamFigures,
    connections_of,
    judge,
    rows_of,
    table,
)

READ = StreamFigures(streams=64, tokens_per_s=50.0, seconds=10.0, tokens=32_000, core_share=0.2)


def take(rate: int, p50_us: int, processor_us: int | None = None) -> LoadSample:
    """Return a sample of one second."""
    return LoadSample(rate, 1_000_000, p50_us, 2 * p50_us, 0, processor_us)


def figures(rows: Sequence[FrontRow], streams: StreamFigures = READ, unrecorded: int = 0) -> FrontFigures:
    """Return figures measured with wrk."""
    return FrontFigures(tuple(rows), streams, unrecorded, "wrk")


def good(connections: int) -> FrontRow:
    """Return a row of Kelvin that meets every claim."""
    return FrontRow(connections, KELVIN, 3000.0, 1.0, 2.0, 3, 0, 1.0, 0.10, None, 300.0)


def test_ratio_uses_figures_of_one_round() -> None:
    """A machine that slows down between rounds does not change the ratios."""
    taken = {
        (16, KELVIN): [take(3000, 900, 600_000), take(1500, 1800, 600_000), take(1400, 1800, 700_000)],
        (16, NGINX): [take(30_000, 100), take(15_000, 200), take(14_000, 200)],
        (16, UPSTREAM): [take(60_000, 50), take(30_000, 100), take(30_000, 100)],
    }
    alone, nginx, ours = rows_of(taken)
    assert [row.system for row in (alone, nginx, ours)] == [UPSTREAM, NGINX, KELVIN]
    assert ours.ratio_to_nginx == pytest.approx(0.1)
    assert ours.added_p50_ms == pytest.approx(1.7)
    assert ours.processor_us == pytest.approx(400)
    assert [alone.kelvin_ratio, nginx.kelvin_ratio] == pytest.approx([0.05, 0.1])
    assert ours.kelvin_ratio is None
    assert (ours.requests_per_s, ours.p50_ms, ours.n) == (1500, 1.8, 3)
    assert (alone.added_p50_ms, nginx.ratio_to_nginx, nginx.processor_us) == (None, None, None)


def test_without_nginx_its_figure_is_not_measured() -> None:
    """Without nginx its claim has no value and no verdict. Other rows stay."""
    found = figures(rows_of({(16, KELVIN): [take(3000, 900)], (16, UPSTREAM): [take(60_000, 50)]}))
    of_nginx = next(verdict for verdict in judge(found) if "nginx" in verdict.claim)
    assert (of_nginx.value, of_nginx.passed) == (None, None)
    alone, ours = (line.split()[1:] for line in table(found).splitlines()[2:4])
    assert (alone[:2], len(alone), len(ours)) == (["upstream", "alone"], 6, 5)


def peer(system: str, ratio: float) -> FrontRow:
    """Return a peer's row with this ratio to Kelvin."""
    return FrontRow(16, system, 100.0, 100.0, 150.0, 3, 0, 99.0, 0.01, ratio, None)


@pytest.mark.parametrize(("system", "ratio"), [(RAY, 8.0), (LITELLM, 25.0)])
def test_each_peer_has_its_own_limit(system: str, ratio: float) -> None:
    """A peer that is not installed has no verdict."""

    def verdict(rows: Sequence[FrontRow]) -> bool | None:
        return next(each.passed for each in judge(figures(rows)) if system in each.claim)

    assert verdict([good(1), good(16), peer(system, ratio)]) is True
    assert verdict([good(1), good(16), peer(system, ratio - 0.01)]) is False
    assert verdict([good(1), good(16)]) is None


def test_good_figures_pass() -> None:
    """The limits themselves pass."""
    rows = [good(1), good(16), peer(RAY, 8.0), peer(LITELLM, 25.0)]
    assert [verdict.passed for verdict in judge(figures(rows))] == [True] * 10


@pytest.mark.parametrize(
    ("one", "some", "streams", "unrecorded", "claim"),
    [
        pytest.param({"added_p50_ms": 1.01}, {}, {}, 0, "added to the median", id="a slow one"),
        pytest.param({}, {"ratio_to_nginx": 0.099}, {}, 0, "nginx", id="less than a tenth"),
        pytest.param({}, {"requests_per_s": 2999.0}, {}, 0, "through one core", id="too few"),
        pytest.param({}, {}, {"core_share": 0.26}, 0, "core for streams", id="streams take too much"),
        pytest.param({}, {}, {"tokens": 31_000}, 0, "tokens that came", id="streams that lag"),
        pytest.param({"requests_per_s": 0.0}, {}, {}, 0, "without any answer", id="no request was answered"),
        pytest.param({"bad": 1}, {}, {}, 0, "not answered right", id="one went wrong"),
        pytest.param({}, {}, {}, 1, "without a usage record", id="one went unrecorded"),
    ],
)
def test_a_bad_figure_fails(
    one: dict[str, Any], some: dict[str, Any], streams: dict[str, Any], unrecorded: int, claim: str
) -> None:
    replace = msgspec.structs.replace
    found = figures([replace(good(1), **one), replace(good(16), **some)], replace(READ, **streams), unrecorded)
    red = [verdict.claim for verdict in judge(found) if verdict.passed is False]
    assert len(red) == 1
    assert claim in red[0]


@pytest.mark.parametrize(
    ("row", "streams", "unrecorded", "passed"),
    [
        pytest.param({}, {}, 0, True, id="all was measured"),
        pytest.param({"added_p50_ms": 9.0}, {}, 0, True, id="a line that does not hold is printed"),
        pytest.param({"requests_per_s": 0.0}, {}, 0, False, id="no request was answered"),
        pytest.param({}, {"tokens": 0}, 0, False, id="no token came"),
        pytest.param({"bad": 1}, {}, 0, False, id="one went wrong"),
        pytest.param({}, {}, 1, False, id="one went unrecorded"),
    ],
)
def test_the_exit_says_whether_it_was_measured(
    row: dict[str, Any], streams: dict[str, Any], unrecorded: int, passed: bool
) -> None:
    """The exit code needs right and recorded answers of every system. Claims don't count."""
    replace = msgspec.structs.replace
    found = figures([replace(good(1), **row)], replace(READ, **streams), unrecorded)
    assert BenchReport(found, judge(found), {}, 0.0, None).passed is passed


@pytest.mark.parametrize(("words", "want"), [("16, 1,16", (1, 16)), ("512", (512,))])
def test_connection_counts_are_parsed_in_order(words: str, want: Sequence[int]) -> None:
    """Counts are sorted and unique."""
    assert connections_of(words) == want


@pytest.mark.parametrize("words", ["", "0", "1,x", "513", "-1"])
def test_invalid_connection_counts_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="must be numbers of 1 to 512"):
        connections_of(words)


@pytest.mark.parametrize("seconds", [1, 301, 3600])
def test_a_load_is_waited_for_as_long_as_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """The limit covers the streams, which last three times as long as one load."""
    program = mock.MagicMock()
    monkeypatch.setattr(front_bench, "Program", program)
    monkeypatch.setattr(front_bench, "running_activator", mock.MagicMock())
    monkeypatch.setattr(front_tools, "on_core", mock.MagicMock())
    monkeypatch.setattr(front_tools, "try_find", lambda name: None)
    plan = front_bench.FrontPlan((1,), 1, seconds, "own", False, tell=print)
    front_bench._FrontRun(plan, None, tmp_path, ExitStack())
    assert program.call_args.kwargs["answer_s"] > 3 * seconds
