"""Claims of a burst fail where they should: unequal tenants, disorder, lost answers, memory, repeated starts."""

import msgspec
import pytest

from coldstart_bench.harness.process_stats import MemoryUse
from coldstart_bench.report.bench_report import BenchReport
from coldstart_bench.suites.burst_bench import (
    EACH_BYTES,
    BurstFigures,
    TenantAnswers,
    fairness,
    inversions,
    judge,
    served,
)

SLOTS = 2
TENANTS = ("a", "b")
IN_ORDER = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def memory(grown: int) -> MemoryUse:
    """Return memory use that grew by this much."""
    return MemoryUse(0, grown, grown, 0, grown, grown)


def both(ends: list[float], codes: dict[str, int] | None = None) -> list[TenantAnswers]:
    """Return the answers of two tenants. The second has these ends and codes."""
    wanted = len(IN_ORDER)
    return [
        served("a", wanted, IN_ORDER, 0, {}, SLOTS),
        served("b", wanted, ends, 0, codes or {}, SLOTS),
    ]


@pytest.mark.parametrize(
    ("ends", "apart", "want"),
    [
        pytest.param(IN_ORDER, 1, 0.0, id="in order"),
        pytest.param([2.0, 1.0], 1, 1.0, id="the other way round"),
        pytest.param([2.0, 1.0, 3.0], 2, 0.0, id="served at once, they have no order"),
        pytest.param([3.0, 1.0, 2.0], 2, 1.0, id="but two that are farther apart have"),
        pytest.param([1.0], 1, None, id="one has no order"),
    ],
)
def test_inversions(ends: list[float], apart: int, want: float | None) -> None:
    """Only pairs whose requests could have waited for one another count."""
    assert inversions(ends, apart) == want


def test_fairness() -> None:
    """One tenant after the other is half as fair as alternating tenants."""
    fair = [(1.0, "a"), (1.1, "b"), (2.0, "a"), (2.1, "b")]
    in_turn = [(1.0, "a"), (1.1, "a"), (2.0, "b"), (2.1, "b")]
    assert fairness(fair, TENANTS) == 1.0
    assert fairness(in_turn, TENANTS) == 0.5
    assert fairness([], TENANTS) is None


LOST = tuple(both(IN_ORDER[:-1], {"overloaded": 1}))
WRONG = (served("a", len(IN_ORDER), IN_ORDER[:-1], 1, {}, SLOTS),)
GOOD = BurstFigures(tuple(both(IN_ORDER)), 1.0, None, memory(0), starts=1, chunk_reads=40, chunks=40)


@pytest.mark.parametrize(
    ("changed", "want", "passed"),
    [
        pytest.param({}, [], True, id="all holds"),
        pytest.param({"served": LOST}, ["requests that were not"], False, id="one is lost"),
        pytest.param({"served": WRONG}, ["requests that were not"], False, id="one is wrong"),
        pytest.param({"fairness": 0.5}, ["fairness between"], False, id="one tenant first"),
        pytest.param({"served": tuple(both(IN_ORDER[::-1]))}, ["pairs of a tenant"], False, id="the last first"),
        pytest.param({"memory": memory(12 * EACH_BYTES + 12)}, ["bytes of the activator"], False, id="too much memory"),
        pytest.param({"starts": 2}, ["starts of the model"], False, id="started twice"),
        pytest.param({"starts": 0}, ["starts of the model"], False, id="it was not at zero"),
        pytest.param({"chunk_reads": 41}, ["reads of a chunk"], True, id="a chunk was read twice: it is only printed"),
    ],
)
def test_missed_burst_limit_fails_its_claim_alone(changed: dict[str, object], want: list[str], passed: bool) -> None:
    """The exit code depends on the deciding claims only."""
    figures = msgspec.structs.replace(GOOD, **changed)
    found = [one.claim for one in judge(figures) if one.passed is False]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))
    assert BenchReport(figures, judge(figures), {}, 0.0, None).passed is passed


def test_unread_chunks_hold_no_claim() -> None:
    """Without any read, the claim is not measured."""
    reads = judge(msgspec.structs.replace(GOOD, chunk_reads=0))[-1]
    assert (reads.claim, reads.value, reads.passed) == ("reads of a chunk", None, None)
