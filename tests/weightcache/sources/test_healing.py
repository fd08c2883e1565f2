"""The healing policy as a table: which source is tried next, and how a load ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.errors import Unavailable
from weightcache.sources.policy.healing import (
    FAULTS,
    Fetched,
    HealingStep,
    ReadAttempt,
    ReadOutcome,
    SourceRule,
    TrySource,
    Unrecoverable,
    choose_step,
)

K = ReadOutcome
RULES = (SourceRule("nvme", 1), SourceRule("peer", 1), SourceRule("store", 2))


def away(tier: str) -> ReadAttempt:
    return ReadAttempt(tier, K.AWAY, Unavailable(tier))


def nvme(outcome: ReadOutcome) -> ReadAttempt:
    return ReadAttempt("nvme", outcome)


def peer(outcome: ReadOutcome) -> ReadAttempt:
    return ReadAttempt("peer", outcome)


def store(outcome: ReadOutcome) -> ReadAttempt:
    return ReadAttempt("store", outcome)


@pytest.mark.parametrize(
    ("reads", "want"),
    [
        pytest.param((), TrySource(0), id="the first source first"),
        pytest.param((nvme(K.WHOLE),), Fetched("nvme"), id="whole is the end"),
        pytest.param((nvme(K.VERIFIED),), Fetched("nvme"), id="bytes that the source verified are the end"),
        pytest.param((nvme(K.ABSENT),), TrySource(1), id="the next if there is no copy"),
        pytest.param((nvme(K.DIGEST),), TrySource(1), id="the next if the copy is wrong"),
        pytest.param((nvme(K.LENGTH),), TrySource(1), id="the next if it has another length"),
        pytest.param((nvme(K.SHORT),), TrySource(1), id="the next if it ends early"),
        pytest.param((nvme(K.UNREADABLE),), TrySource(1), id="the next if it can't be read"),
        pytest.param((nvme(K.MISSING),), TrySource(1), id="the next if it went missing"),
        pytest.param((away("nvme"),), TrySource(1), id="the next if a source is unavailable"),
        pytest.param((nvme(K.DIGEST), peer(K.WHOLE)), Fetched("peer"), id="healed from a peer"),
        pytest.param((nvme(K.DIGEST), peer(K.DIGEST)), TrySource(2), id="a peer has one attempt"),
        pytest.param(
            (nvme(K.DIGEST), peer(K.ABSENT), store(K.DIGEST)), TrySource(2), id="a bad read is not a bad object"
        ),
        pytest.param((nvme(K.DIGEST), peer(K.ABSENT), store(K.WHOLE)), Fetched("store"), id="healed from the store"),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.SHORT), store(K.WHOLE)), Fetched("store"), id="healed by a retry"
        ),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.SHORT), store(K.DIGEST)),
            Unrecoverable(store(K.DIGEST)),
            id="two bad reads mean corrupt",
        ),
        pytest.param(
            (nvme(K.DIGEST), peer(K.DIGEST), store(K.ABSENT)),
            Unrecoverable(store(K.ABSENT)),
            id="a chunk that the store lacks is missing",
        ),
        pytest.param(
            (away("nvme"), peer(K.ABSENT), store(K.ABSENT)),
            Unrecoverable(away("nvme")),
            id="but an unavailable source may have it",
        ),
        pytest.param(
            (away("nvme"), away("peer"), store(K.ABSENT)),
            Unrecoverable(away("peer")),
            id="of several unavailable sources the last one",
        ),
        pytest.param(
            (away("nvme"), peer(K.ABSENT), store(K.DIGEST), store(K.DIGEST)),
            Unrecoverable(store(K.DIGEST)),
            id="corrupt in the store, whatever is unavailable",
        ),
        pytest.param(
            (nvme(K.DIGEST), peer(K.DIGEST), away("store")), Unrecoverable(away("store")), id="the store may have it"
        ),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.DIGEST), away("store")),
            Unrecoverable(away("store")),
            id="unavailable after a bad read: nothing is known",
        ),
    ],
)
def test_choose_step(reads: tuple[ReadAttempt, ...], want: HealingStep) -> None:
    assert choose_step(RULES, reads) == want


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_healing_always_ends(attempts: list[int], data: st.DataObject) -> None:
    """Sources are tried in order and within their attempts, good bytes end the load, and every load ends."""
    rules = [SourceRule(f"tier{number}", count) for number, count in enumerate(attempts)]
    reads: list[ReadAttempt] = []
    while isinstance(step := choose_step(rules, reads), TrySource):
        tier = rules[step.position].tier
        assert not reads or reads[-1].tier <= tier
        outcome = data.draw(st.sampled_from(ReadOutcome))
        reads.append(away(tier) if outcome is K.AWAY else ReadAttempt(tier, outcome))
        assert sum(trial.tier == tier for trial in reads) <= rules[step.position].attempts
    good = [trial for trial in reads if trial.outcome in (K.WHOLE, K.VERIFIED)]
    if isinstance(step, Fetched):
        assert good == [reads[-1]]
        assert step.tier == reads[-1].tier
    else:
        assert good == []
        assert {trial.tier for trial in reads} == {rule.tier for rule in rules}
        assert step.decisive in reads
        assert step.decisive.outcome in FAULTS or step.decisive == reads[-1] or step.decisive.failure is not None
