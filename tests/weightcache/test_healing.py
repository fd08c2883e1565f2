"""Which source is asked next, and what a load ends with: every case of the policy in a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import Unavailable
from weightcache.policy.healing import FAULTS, Arrived, Ask, Lost, Outcome, Rule, Step, Trial, choose_step

K = Outcome
RULES = (Rule("nvme", 1), Rule("peer", 1), Rule("store", 2))


def away(tier: str) -> Trial:
    return Trial(tier, K.AWAY, Unavailable(tier))


def nvme(outcome: Outcome) -> Trial:
    return Trial("nvme", outcome)


def peer(outcome: Outcome) -> Trial:
    return Trial("peer", outcome)


def store(outcome: Outcome) -> Trial:
    return Trial("store", outcome)


@pytest.mark.parametrize(
    ("trials", "want"),
    [
        pytest.param((), Ask(0), id="the first source first"),
        pytest.param((nvme(K.WHOLE),), Arrived("nvme"), id="whole is the end"),
        pytest.param((nvme(K.VERIFIED),), Arrived("nvme"), id="so is what its source verified"),
        pytest.param((nvme(K.ABSENT),), Ask(1), id="the next where there is none"),
        pytest.param((nvme(K.DIGEST),), Ask(1), id="the next where it is wrong"),
        pytest.param((nvme(K.LENGTH),), Ask(1), id="the next where it has another length"),
        pytest.param((nvme(K.SHORT),), Ask(1), id="the next where it ends early"),
        pytest.param((nvme(K.UNREADABLE),), Ask(1), id="the next where it can't be read"),
        pytest.param((nvme(K.MISSING),), Ask(1), id="the next where it went missing"),
        pytest.param((away("nvme"),), Ask(1), id="the next where a source is away"),
        pytest.param((nvme(K.DIGEST), peer(K.WHOLE)), Arrived("peer"), id="healed from a peer"),
        pytest.param((nvme(K.DIGEST), peer(K.DIGEST)), Ask(2), id="a peer has one attempt"),
        pytest.param((nvme(K.DIGEST), peer(K.ABSENT), store(K.DIGEST)), Ask(2), id="a bad read is not a bad object"),
        pytest.param((nvme(K.DIGEST), peer(K.ABSENT), store(K.WHOLE)), Arrived("store"), id="healed from the store"),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.SHORT), store(K.WHOLE)), Arrived("store"), id="healed by a retry"
        ),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.SHORT), store(K.DIGEST)),
            Lost(store(K.DIGEST)),
            id="twice is corrupt",
        ),
        pytest.param(
            (nvme(K.DIGEST), peer(K.DIGEST), store(K.ABSENT)),
            Lost(store(K.ABSENT)),
            id="what the store lacks is missing",
        ),
        pytest.param(
            (away("nvme"), peer(K.ABSENT), store(K.ABSENT)),
            Lost(away("nvme")),
            id="but a source that is away may have it",
        ),
        pytest.param(
            (away("nvme"), away("peer"), store(K.ABSENT)), Lost(away("peer")), id="of several the last one's word"
        ),
        pytest.param(
            (away("nvme"), peer(K.ABSENT), store(K.DIGEST), store(K.DIGEST)),
            Lost(store(K.DIGEST)),
            id="the store is corrupt whoever is away",
        ),
        pytest.param((nvme(K.DIGEST), peer(K.DIGEST), away("store")), Lost(away("store")), id="the store may have it"),
        pytest.param(
            (nvme(K.ABSENT), peer(K.ABSENT), store(K.DIGEST), away("store")),
            Lost(away("store")),
            id="away after a bad read, nothing is known",
        ),
    ],
)
def test_choose_step(trials: tuple[Trial, ...], want: Step) -> None:
    """After these trials, that."""
    assert choose_step(RULES, trials) == want


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_it_ends(attempts: list[int], data: st.DataObject) -> None:
    """However the sources answer: in order, none more often than allowed, good bytes at once, and then an end."""
    rules = [Rule(f"tier{number}", count) for number, count in enumerate(attempts)]
    trials: list[Trial] = []
    while isinstance(step := choose_step(rules, trials), Ask):
        tier = rules[step.position].tier
        assert not trials or trials[-1].tier <= tier
        outcome = data.draw(st.sampled_from(Outcome))
        trials.append(away(tier) if outcome is K.AWAY else Trial(tier, outcome))
        assert sum(trial.tier == tier for trial in trials) <= rules[step.position].attempts
    good = [trial for trial in trials if trial.outcome in (K.WHOLE, K.VERIFIED)]
    if isinstance(step, Arrived):
        assert good == [trials[-1]]
        assert step.tier == trials[-1].tier
    else:
        assert good == []
        assert {trial.tier for trial in trials} == {rule.tier for rule in rules}
        assert step.decisive in trials
        assert step.decisive.outcome in FAULTS or step.decisive == trials[-1] or step.decisive.failure is not None
