"""What is expected of a start: the larger of process and bytes, then its steps, as they went before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.timeline import Span, Stage
from contracts.wire import encode
from controlplane.policy.eta import (
    GUESS,
    KEPT_ERRORS,
    MAX_VERSIONS,
    PARKED_S,
    Estimate,
    History,
    Known,
    PastForecast,
    Steps,
    size_class,
)

MB = 1 << 20


def spans(promoted_s: float, leased_s: float, ready_s: float) -> tuple[Span, ...]:
    """Of a start, each since it was asked for."""
    ends = {Stage.DECIDED: 0.0, Stage.PROMOTED: promoted_s, Stage.LEASED: leased_s, Stage.READY: ready_s}
    return tuple(Span(stage, round(after_s * 1e6)) for stage, after_s in ends.items())


@pytest.mark.parametrize(
    ("process_s", "bytes_s", "ready_s"),
    [
        pytest.param(0.3, 0.1, 0.45, id="a process that takes longer than its bytes hides them"),
        pytest.param(0.1, 0.3, 0.45, id="bytes that take longer than the process hide it"),
        pytest.param(0.0, 0.0, 0.15, id="what is there already leaves the steps"),
    ],
)
def test_process_and_bytes_are_side_by_side(process_s: float, bytes_s: float, ready_s: float) -> None:
    """The rest is one after the other."""
    found = Estimate(process_s, bytes_s, Steps(lease_s=0.05, bind_s=0.1, answer_s=0.2), Known.GUESS)
    assert found.ready_s == pytest.approx(ready_s)
    assert found.first_token_s == pytest.approx(ready_s + 0.2)


def test_a_version_is_known_by_its_own_starts_then_by_its_size_then_by_a_guess() -> None:
    """In this order."""
    history = History[str]()
    assert history.estimate("a", 100 * MB, 0.0, parked=True) == Estimate(PARKED_S, 0.0, GUESS, Known.GUESS)
    history.started("a", 100 * MB, spans(0.01, 0.03, 0.23), parked=True, bytes_s=0.0, tier="host")
    own = history.estimate("a", 100 * MB, 0.5, parked=True)
    assert own.known is Known.VERSION
    assert (own.process_s, own.steps.lease_s, own.steps.bind_s) == pytest.approx((0.01, 0.02, 0.2))
    alike = history.estimate("b", 101 * MB, 0.5, parked=True)
    assert alike.known is Known.SIZE
    assert alike.ready_s == pytest.approx(own.ready_s)
    assert history.estimate("c", 900 * MB, 0.5, parked=True).known is Known.GUESS


def test_a_process_that_has_to_be_borne_is_another_matter() -> None:
    """Its time is learned apart from that of parked ones."""
    history = History[str]()
    history.started("a", MB, spans(0.5, 0.6, 0.7), parked=False, bytes_s=None, tier="host")
    assert history.estimate("a", MB, 0.0, parked=True).process_s == PARKED_S
    assert history.estimate("a", MB, 0.0, parked=False).process_s == pytest.approx(0.5)


def test_whole_starts_and_wakes_are_means_of_what_was_seen() -> None:
    """They say how many; without any they are guesses."""
    history = History[str]()
    assert history.start("a", MB).seen == 0
    history.started("a", MB, spans(0.1, 0.2, 1.0), parked=True, bytes_s=None, tier="host")
    history.started("a", MB, spans(0.1, 0.2, 2.0), parked=True, bytes_s=None, tier="host")
    assert history.start("a", MB).seconds == pytest.approx(1.3)
    assert history.start("a", MB).seen == 2
    history.woke("a", MB, 0.02)
    assert (history.wake("a", MB).seconds, history.wake("b", MB).seconds) == (0.02, 0.02)
    assert history.wake("c", 64 * MB).seen == 0


def test_a_wake_without_weights_is_held_against_a_start_over_the_same_bytes() -> None:
    """What a lease took is one mean of both: a start that had its bytes from the disk looks no worse for that beside a
    wake that found them in memory. By tier each has its own.
    """
    history = History[str]()
    guess = history.refill("a", MB)
    assert guess.seen == 0
    assert guess.seconds == pytest.approx(GUESS.lease_s + GUESS.bind_s)
    history.started("a", MB, spans(0.1, 5.1, 5.3), parked=True, bytes_s=None, tier="nvme")
    unseen = history.refill("a", MB)
    assert unseen.seen == 0
    assert unseen.seconds == pytest.approx(5.2), "a start's, without its process"
    history.refilled("a", MB, spans(0.0, 1.0, 1.1), "host")
    fetch_s = 0.3 * 1.0 + 0.7 * 5.0
    assert history.start("a", MB).seconds == pytest.approx(0.3 + fetch_s)
    assert history.refill("a", MB).seconds == pytest.approx(0.1 + fetch_s)
    by_tier = history.fetches("a")
    assert {tier: each.seconds for tier, each in by_tier.items()} == pytest.approx({"nvme": 5.0, "host": 1.0})
    assert [each.seen for each in by_tier.values()] == [1, 1]
    history.refilled("a", MB, (Span(Stage.READY, 5),), "host")
    assert history.refill("a", MB).seen == 1


def test_a_wake_that_nobody_saw_takes_no_longer_than_one_without_weights() -> None:
    """It does less; one that was seen is believed."""
    history = History[str]()
    history.started("a", MB, spans(0.001, 0.002, 0.022), parked=True, bytes_s=None, tier="host")
    assert history.wake("a", MB).seconds == history.refill("a", MB).seconds < 0.05
    history.woke("a", MB, 0.2)
    assert history.wake("a", MB).seconds == 0.2


def test_spans_without_their_stages_teach_nothing() -> None:
    """Nor does an answer of a version that never started here."""
    history = History[str]()
    history.started("a", MB, (Span(Stage.READY, 5),), parked=True, bytes_s=0.0, tier="host")
    history.answered("a", 3.0)
    history.missed("a", PastForecast(predicted_s=1.0, actual_s=1.0, tier="nvme"))
    assert history.estimate("a", MB, 0.0, parked=True).known is Known.GUESS
    assert history.misses("a") == ()


def test_what_is_kept_is_bounded() -> None:
    """Versions and errors alike: the oldest are forgotten."""
    history = History[int]()
    for number in range(MAX_VERSIONS + 5):
        history.started(number, MB, spans(0.1, 0.2, 0.3), parked=True, bytes_s=None, tier="host")
    for number in range(KEPT_ERRORS + 5):
        history.missed(MAX_VERSIONS, PastForecast(predicted_s=1.0, actual_s=float(number), tier="host"))
    assert history.estimate(0, 64 * MB, 0.0, parked=True).known is Known.GUESS
    assert [miss.actual_s for miss in history.misses(MAX_VERSIONS)] == [float(n) for n in range(5, KEPT_ERRORS + 5)]


def test_a_load_that_was_slower_than_its_tier_teaches_the_lease_nothing() -> None:
    """Else a start from memory would be expected to take what the disk was late by."""
    history = History[str]()
    history.started("a", MB, spans(0.01, 5.0, 5.1), parked=True, bytes_s=1.0, tier="host")
    assert history.estimate("a", MB, 0.0, parked=True).steps.lease_s == GUESS.lease_s


def test_what_is_done_beside_the_bytes_is_not_done_after_them() -> None:
    """A start that moved bytes teaches nothing of one from memory, nor the other way round, once both are known."""
    history = History[str]()
    history.started("a", MB, spans(0.01, 0.02, 0.12), parked=True, bytes_s=0.0, tier="host")
    assert history.estimate("a", MB, 0.5, parked=True).steps.bind_s == pytest.approx(0.1)
    history.started("a", MB, spans(0.01, 0.60, 0.61), parked=True, bytes_s=0.5, tier="host")
    assert history.estimate("a", MB, 0.5, parked=True).steps.bind_s == pytest.approx(0.01)
    assert history.estimate("a", MB, 0.0, parked=True).steps.bind_s == pytest.approx(0.1)


@given(
    steps=st.tuples(st.floats(0.001, 1), st.floats(0.0, 1), st.floats(0.001, 1)),
    noise=st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8),
)
def test_a_steady_version_is_foretold(steps: tuple[float, float, float], noise: list[float]) -> None:
    """After eight starts that varied by a tenth, the ninth is right within a fifth."""
    process_s, lease_s, bind_s = steps
    history = History[str]()
    for factor in noise:
        promoted_s = process_s * factor
        leased_s = promoted_s + lease_s * factor
        found = spans(promoted_s, leased_s, leased_s + bind_s * factor)
        history.started("a", MB, found, parked=True, bytes_s=0.0, tier="host")
    said = history.estimate("a", MB, 0.0, parked=True)
    assert said.steps.lease_s == pytest.approx(lease_s, rel=0.2, abs=2e-6)
    assert said.steps.bind_s == pytest.approx(bind_s, rel=0.2, abs=2e-6)


def test_a_ratio_tells_a_wrong_forecast() -> None:
    """Negative control of the measure: half of the truth is 2, and nothing at all is not a division by zero."""
    assert PastForecast(predicted_s=1.0, actual_s=2.0, tier="nvme").ratio == 2.0
    assert PastForecast(predicted_s=0.0, actual_s=1.0, tier="nvme").ratio > 1000
    told = encode(PastForecast(predicted_s=1.0, actual_s=2.5, tier="nvme"))
    assert told == b'{"predicted_s":1.0,"actual_s":2.5,"tier":"nvme"}'
    assert size_class(0) == 0
