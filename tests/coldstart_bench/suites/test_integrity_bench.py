"""Fates of damaged bytes: only healing, and a refusal with the name, are good."""

from collections.abc import Sequence

import pytest

from coldstart_bench.suites.integrity_bench import (
    Fate,
    InjectedDamage,
    classify_injection,
    count_injections,
    figures_of,
    judge,
)


@pytest.mark.parametrize(
    ("answer", "refusal", "healable", "want"),
    [
        pytest.param("right", "", True, "healed", id="healed while the request waits"),
        pytest.param("wrong", "", True, "served wrong", id="other text"),
        pytest.param("wrong", "", False, "served wrong", id="other text from what no copy heals"),
        pytest.param("right", "", False, "unexplained", id="right text from what no copy heals: it was not read"),
        pytest.param(None, "500 chunk_corrupt: abc in tier 'store'", False, "refused", id="refused by name"),
        pytest.param(None, "500 internal", False, "unexplained", id="refused without the name"),
        pytest.param(None, "500 chunk_corrupt: abc", True, "unexplained", id="refused what could be healed"),
    ],
)
def test_injection_is_classified_by_its_answer(answer: str | None, refusal: str, healable: bool, want: Fate) -> None:
    assert classify_injection(answer, refusal, "right", ["abc"], healable=healable) == want


GOOD = [InjectedDamage("nvme", ("cut", "zeroes"), "healed", 2), InjectedDamage("store", ("zeroes",), "refused", 1)]


def failing(injured: Sequence[InjectedDamage], mended: bool = True) -> list[str]:
    found = figures_of(injured, mended, [2.0], [2.5], ())
    return [verdict.claim for verdict in judge(found) if verdict.passed is False]


def test_all_healed_or_refused_is_good() -> None:
    """Every injection is counted, and the verification rate is not judged."""
    assert failing(GOOD) == []
    assert [(row.injected, row.healed, row.refused) for row in count_injections(GOOD)] == [(2, 2, 0), (1, 0, 1)]


@pytest.mark.parametrize(
    ("injured", "claim"),
    [
        pytest.param(InjectedDamage("nvme", ("cut",), "served wrong", 1), "answers from damaged", id="served"),
        pytest.param(InjectedDamage("store", ("cut",), "unexplained", 1), "neither healed nor", id="unexplained"),
        pytest.param(InjectedDamage("nvme", ("cut", "cut"), "healed", 1), "not counted", id="not counted"),
    ],
)
def test_unhealed_injection_fails_its_claim(injured: InjectedDamage, claim: str) -> None:
    assert any(claim in said for said in failing([*GOOD, injured]))
    assert failing(GOOD, mended=False)
