"""Claims of a flood fail where they should: served in arrival order, the quiet tenant waits."""

import pytest

from coldstart_bench.suites.flood_bench import FloodFigures, QueueWaits, judge, queue_waits, table

SLOTS, SLOT_S, LOUD = 4, 0.1, 40


def fair() -> tuple[QueueWaits, QueueWaits]:
    """Waits if the quiet tenant gets the next free slot."""
    queued = [0.02, 0.05, 0.08, 0.095]
    return queue_waits("loud", LOUD, LOUD, [0.5] * LOUD, [0.5] * LOUD), queue_waits("quiet", 4, 4, queued, queued)


def in_turn() -> tuple[QueueWaits, QueueWaits]:
    """Waits in arrival order: the quiet tenant waits for all forty requests."""
    loud, _ = fair()
    queued = [0.9, 0.8, 0.7, 0.6]
    return loud, queue_waits("quiet", 4, 4, queued, queued)


def lost() -> tuple[QueueWaits, QueueWaits]:
    """Waits of a run in which one request got no answer."""
    _, quiet = fair()
    return queue_waits("loud", LOUD, LOUD - 1, [0.5] * LOUD, []), quiet


def figures(
    waits: tuple[QueueWaits, QueueWaits], seconds: float = 1.1, inside: int = SLOTS, unrecorded: int = 0
) -> FloodFigures:
    return FloodFigures(SLOTS, SLOT_S, *waits, seconds, inside, unrecorded, None, None)


@pytest.mark.parametrize(
    ("waits", "seconds", "inside", "unrecorded", "want"),
    [
        pytest.param(fair(), 1.1, SLOTS, 0, [], id="all holds"),
        pytest.param(in_turn(), 1.1, SLOTS, 0, ["the quiet tenant's wait in the queue"], id="served in turn"),
        pytest.param(lost(), 1.1, SLOTS, 0, ["requests that were not"], id="one was lost"),
        pytest.param(fair(), 1.1, SLOTS, 1, ["answers without"], id="one is not on the bill"),
        pytest.param(fair(), 1.1, SLOTS, -1, ["usage records beyond"], id="one is on the bill twice"),
        pytest.param(fair(), 1.1, SLOTS + 1, 0, ["requests at the replica beyond"], id="one more than its slots"),
        pytest.param(fair(), 2.0, SLOTS, 0, ["share of the slots' time"], id="slots were idle"),
    ],
)
def test_missed_flood_limit_fails_its_claim_alone(
    waits: tuple[QueueWaits, QueueWaits], seconds: float, inside: int, unrecorded: int, want: list[str]
) -> None:
    verdicts = judge(figures(waits, seconds, inside, unrecorded))
    found = [verdict.claim for verdict in verdicts if verdict.passed is False]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))


def test_quiet_tenant_without_requests_is_not_measured() -> None:
    """No requests are not a wait of 0."""
    loud, _ = fair()
    found = figures((loud, queue_waits("quiet", 0, 0, [], [])))
    verdict = judge(found)[0]
    assert (verdict.value, verdict.passed) == (None, None)
    assert table(found).splitlines()[3].split() == ["quiet", "0", "0", "-", "-", "-", "-"]
