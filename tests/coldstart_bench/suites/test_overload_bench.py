"""Claims of an overload fail where they should: falling goodput, growing memory, the wrong requests shed."""

from collections.abc import Sequence

import msgspec
import pytest

from coldstart_bench.harness.load_protocol import CUT, RequestResult
from coldstart_bench.harness.process_stats import CpuLoad, CpuTime, Sample
from coldstart_bench.suites.overload_bench import (
    PRIORITIES,
    LoadStep,
    OverloadFigures,
    StepParameters,
    judge,
    measure_step,
    notes_of,
    parse_multiples,
    table,
)

ASKED = StepParameters(times=10, rate=3, seconds=10, tokens=16, deadline_s=2)
BEGAN = 5_000_000_000
ABLE = 4 * 16 / 8


def sent(end_s: float, status: int = 200, code: str = "", *, retry_after: bool = False) -> RequestResult:
    """Return a request that was due a second before its end."""
    due, end = int((end_s - 1) * 1e6), int(end_s * 1e6)
    return RequestResult(0, due, due + 1000, end, end, status, code, 0, retry_after)


def step(each: Sequence[RequestResult], ranks: Sequence[str] | None = None, samples: Sequence[Sample] = ()) -> LoadStep:
    """Measure a step of right answers, of one priority by default."""
    return measure_step(ASKED, each, [True] * len(each), ranks or [PRIORITIES[0]] * len(each), samples, BEGAN)


def test_only_timely_answers_count() -> None:
    """Late answers, and answers after the counted time, are no goodput."""
    late = msgspec.structs.replace(sent(6), due_us=0)
    found = step([sent(5), sent(9), sent(11), late])
    assert (found.sent, found.good, found.late, found.wrong) == (4, 3, 1, 0)
    assert found.goodput == 2 * 16 / 8


@pytest.mark.parametrize(
    ("each", "refused", "wrong"),
    [
        pytest.param(sent(3, 503, "overloaded", retry_after=True), {"overloaded": 1}, 0, id="come back then"),
        pytest.param(sent(3, 503, "overloaded"), {}, 1, id="come back, but when"),
        pytest.param(sent(3, 504, "deadline_exceeded"), {"deadline_exceeded": 1}, 0, id="its time was over"),
        pytest.param(sent(3, 503, "deadline_too_short"), {"deadline_too_short": 1}, 0, id="its time was too short"),
        pytest.param(sent(3, 502, "replica_lost", retry_after=True), {}, 1, id="another failure"),
        pytest.param(sent(3, 0, CUT), {}, 1, id="cut"),
        pytest.param(sent(3, 200, CUT), {}, 1, id="cut in its answer"),
    ],
)
def test_refusal_needs_code_and_retry_hint(each: RequestResult, refused: dict[str, int], wrong: int) -> None:
    """A refusal must be retryable at a known time, or name the deadline. Anything else is wrong."""
    found = step([each])
    assert (found.refused, found.wrong, found.good) == (refused, wrong, 0)


def test_memory_is_that_of_its_thirds() -> None:
    """Memory is sampled within the step: its middle third and its last third."""
    samples = [
        Sample(BEGAN + int(at * 1e9), 0, pss) for at, pss in ((-1, 99), (1, 90), (5, 20), (6, 25), (9, 30), (11, 88))
    ]
    found = step([sent(5)], samples=samples)
    assert (found.memory_middle, found.memory_last) == (25, 30)


def test_what_a_request_took_of_the_processor() -> None:
    """Processor time is counted from before the first request was due to after the last one ended."""
    spent = [CpuTime(0, 0), CpuTime(1_000, 0), CpuTime(5_000_000, 2_000_000_000), CpuTime(9_000_000, 9_000_000_000)]
    samples = [Sample(BEGAN + at, 0, 0, each) for at, each in zip((-9, 0, 8_000_000_000, 10**12), spent, strict=True)]
    found = step([sent(5), sent(6)], samples=samples)
    assert found.door == CpuLoad(4_999 / 2, 0.25)
    assert step([sent(5)], samples=samples[1:2]).door is None


def test_loop_delay_and_connection_wait_are_apart() -> None:
    """A late send by the loop, and a wait for a connection, are separate figures."""
    first = msgspec.structs.replace(sent(5), due_us=0, seen_us=70_000, sent_us=70_000)
    second = msgspec.structs.replace(sent(5), due_us=0, seen_us=10, sent_us=90_000)
    found = step([first, second])
    assert found.lag_p99_s == pytest.approx(0.07, rel=0.02)
    assert found.held_up_p99_s == pytest.approx(0.09, rel=0.02)


def test_late_loop_and_busy_cores_are_noted() -> None:
    """A late loop and a waiting activator are noted. Small values are not."""
    quiet, busy = CpuLoad(100.0, 0.05), CpuLoad(100.0, 0.5)
    each = msgspec.structs.replace(step([sent(5)]), lag_p99_s=0.04, door=quiet, loop=quiet)
    assert notes_of([each]) == ()
    each = msgspec.structs.replace(each, lag_p99_s=0.84, door=busy)
    assert notes_of([each]) == (
        "10x: the open loop was 840 ms late itself (p99)",
        "10x: the activator waited for its core for 50% of the time",
    )


def figures(steps: Sequence[LoadStep], unrecorded: int = 0) -> OverloadFigures:
    return OverloadFigures(4, 8.0, 16, ASKED.deadline_s, tuple(steps), unrecorded, None)


def good(**changed: object) -> list[LoadStep]:
    """Return a peak step, and one at ten times the load with these changes."""
    each = [sent(5)] * 4 + [sent(5, 503, "overloaded", retry_after=True)] * 2
    ranks = ["interactive", "interactive", "standard", "batch", "standard", "batch"]
    last = msgspec.structs.replace(step(each, ranks), memory_middle=100, memory_last=100)
    before = msgspec.structs.replace(last, times=1)
    return [before, msgspec.structs.replace(last, **changed)]


@pytest.mark.parametrize(
    ("steps", "unrecorded", "want"),
    [
        pytest.param(good(), 0, [], id="all holds"),
        pytest.param(good(goodput=0.94 * ABLE), 0, ["goodput to its peak"], id="it falls"),
        pytest.param(good(goodput=0.5 * ABLE)[1:], 0, ["goodput to what the slots"], id="a step alone does half"),
        pytest.param(
            [msgspec.structs.replace(each, goodput=0.5 * ABLE) for each in good()],
            0,
            ["goodput to what the slots"],
            id="all steps do half",
        ),
        pytest.param(good(goodput=0.0)[1:], 0, ["goodput to what the slots"], id="nothing is answered in time"),
        pytest.param(good(goodput=0.5 * ABLE, times=0.5)[1:], 0, [], id="more was not asked for"),
        pytest.param(good(memory_last=120), 0, ["share by which memory"], id="memory grows"),
        pytest.param(
            good(answered={"interactive": 0.2, "standard": 0.5, "batch": 0.1}),
            0,
            ["share answered of interactive"],
            id="the wrong ones are shed",
        ),
        pytest.param(good(wrong=1), 0, ["requests neither right"], id="one is lost"),
        pytest.param(good(), 1, ["answers without"], id="one is not on the bill"),
        pytest.param(good(), -1, ["usage records beyond"], id="one is on the bill twice"),
    ],
)
def test_missed_overload_limit_fails_its_claim_alone(steps: list[LoadStep], unrecorded: int, want: list[str]) -> None:
    found = [verdict.claim for verdict in judge(figures(steps, unrecorded)) if verdict.passed is False]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))


def test_short_step_has_no_memory_figure() -> None:
    unmeasured = figures(good(memory_last=None))
    found = {verdict.claim: verdict.value for verdict in judge(unmeasured)}
    assert found["share by which memory still grew"] is None
    assert [line.split()[14] for line in table(unmeasured).splitlines()[-2:]] == ["0M", "-"]


def test_load_multiples_are_parsed_in_order() -> None:
    """Multiples are sorted and unique. A bad one is named."""
    assert parse_multiples("10,1,1,0.5") == (0.5, 1.0, 10.0)
    for words in ("", "1,x", "0", "-1", "101", "nan"):
        with pytest.raises(ValueError, match=f"{words}: must be numbers above 0"):
            parse_multiples(words)
