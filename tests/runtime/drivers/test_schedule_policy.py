"""A step takes every decode, then prompts up to its budget. Costs are divided exactly.

Tenants share the budget. A tenant's prompts run in order of arrival.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drivers.schedule_policy import (
    CPU_BUDGET,
    CUDA_BUDGET,
    OWNER_TENANT,
    Budget,
    SequenceState,
    TokenAllotment,
    apportion,
    plan_step,
)

BUDGET = Budget(mixed_tokens=10, lone_tokens=40, min_prefill_tokens=4)
DECODE = SequenceState(total_tokens=8, computed_tokens=7)


def prompt(tokens: int, computed: int = 0) -> SequenceState:
    return SequenceState(tokens, computed)


def of(tenant: str, tokens: int) -> SequenceState:
    return SequenceState(tokens, 0, tenant)


@pytest.mark.parametrize(
    ("running", "want"),
    [
        pytest.param([], [], id="nothing runs, nothing is planned"),
        pytest.param([DECODE, DECODE], [(0, 1), (1, 1)], id="decodes compute one token each"),
        pytest.param([prompt(30)], [(0, 30)], id="a lone prompt is not cut below the lone budget"),
        pytest.param([prompt(50)], [(0, 40)], id="a longer one is cut at it"),
        pytest.param([prompt(50, 40)], [(0, 10)], id="and goes on where it was cut"),
        pytest.param([prompt(30), prompt(30)], [(0, 30), (1, 10)], id="the first prompt goes first"),
        pytest.param([prompt(50), prompt(5)], [(0, 40)], id="a short prompt does not overtake"),
        pytest.param([prompt(30), DECODE], [(1, 1), (0, 9)], id="beside a decode a prompt gets what the budget leaves"),
        pytest.param([*[DECODE] * 9, prompt(9)], [*[(i, 1) for i in range(9)], (9, 4)], id="prefill never starves"),
        pytest.param([*[DECODE] * 12], [(i, 1) for i in range(12)], id="no decode is left out"),
        pytest.param([prompt(1), prompt(50)], [(0, 1), (1, 39)], id="a one-token prompt is a prefill, no decode"),
        pytest.param([prompt(50), of("b", 5)], [(0, 5), (1, 5)], id="another tenant's short prompt does not wait"),
        pytest.param([prompt(50), prompt(50), of("b", 50)], [(0, 5), (2, 5)], id="owner and guest have equal parts"),
        pytest.param([of("b", 50), of("c", 2), of("d", 50)], [(0, 4), (1, 2), (2, 4)], id="unused parts are shared"),
        pytest.param([of("b", 50), of("c", 50), prompt(50)], [(0, 3), (1, 2), (2, 5)], id="the owner has half"),
        pytest.param([of("b", 2), prompt(50)], [(0, 2), (1, 8)], id="and what guests leave"),
        pytest.param(
            [*[DECODE] * 9, *map(of, "abcdef", [9] * 6)],
            [*[(i, 1) for i in range(9)], *[(i, 1) for i in range(9, 13)]],
            id="of more tenants than tokens some have one",
        ),
        pytest.param([prompt(2), of("b", 50)], [(0, 2), (1, 4)], id="a guest's part of a step of the owner's is small"),
        pytest.param([prompt(4), of("b", 9), of("c", 9)], [(0, 4), (1, 2), (2, 2)], id="that of all guests together"),
        pytest.param([of("b", 50)], [(0, 10)], id="a guest's lone prompt is cut: the owner may come during the step"),
    ],
)
def test_plan_step(running: list[SequenceState], want: list[tuple[int, int]]) -> None:
    """Decodes come first, then prompts in order of arrival and by tenant."""
    assert plan_step(running, BUDGET) == tuple(TokenAllotment(index, count) for index, count in want)


@given(
    running=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 59))
        .filter(lambda pair: pair[0] > pair[1])
        .flatmap(
            lambda pair: st.builds(
                SequenceState, st.just(pair[0]), st.just(pair[1]), st.sampled_from([OWNER_TENANT, *"abc"])
            )
        ),
        max_size=20,
    )
)
def test_plan_computes_every_decode(running: list[SequenceState]) -> None:
    """Every decode is planned, the step is bounded, and prefill never starves."""
    shares = plan_step(running, BUDGET)
    indices = [share.index for share in shares]
    assert len(set(indices)) == len(indices)
    decodes = [index for index, state in enumerate(running) if state.is_decode]
    assert indices[: len(decodes)] == decodes
    assert all(1 <= share.count <= running[share.index].uncomputed_tokens for share in shares)
    prefill = sum(share.count for share in shares[len(decodes) :])
    assert prefill <= BUDGET.prefill_tokens(len(decodes))
    if len(decodes) < len(running):
        assert prefill > 0


@pytest.mark.parametrize("budget", [CPU_BUDGET, CUDA_BUDGET], ids=["on a CPU", "on a CUDA device"])
def test_prompts_progress_beside_decodes(budget: Budget) -> None:
    """Prompts state beside any number of decodes, and get more of a step when alone."""
    assert budget.prefill_tokens(10_000) == budget.min_prefill_tokens > 0
    assert budget.prefill_tokens(0) > budget.prefill_tokens(1)


@given(total=st.integers(0, 10**9), weights=st.lists(st.integers(0, 1000), min_size=1).filter(any))
def test_apportion(total: int, weights: list[int]) -> None:
    """The parts sum to the total, and each is within one of its due."""
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights)
        assert part == 0 or weight > 0 or part <= 1
