"""A step takes every decode, then prompts up to its budget.

Tenants share the budget. A tenant's prompts run in order of arrival.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drivers.interface import OWNER_TENANT
from runtime.drivers.schedule_policy import (
    CPU_BUDGET,
    CUDA_BUDGET,
    Budget,
    SequenceState,
    TokenAllotment,
    plan_step,
)

BUDGET = Budget(mixed_tokens=10, lone_tokens=40, min_prefill_tokens=4)
DECODE = SequenceState(total_tokens=8, computed_tokens=7)


def prompt(tokens: int, computed: int = 0) -> SequenceState:
    return SequenceState(tokens, computed)


def guest_prompt(tenant: str, tokens: int) -> SequenceState:
    return SequenceState(tokens, 0, tenant)


@pytest.mark.parametrize(
    ("running", "want"),
    [
        pytest.param([], [], id="nothing runs, nothing is planned"),
        pytest.param([DECODE, DECODE], [(0, 1), (1, 1)], id="decodes compute one token each"),
        pytest.param([prompt(30)], [(0, 30)], id="a lone prompt is not cut below the lone budget"),
        pytest.param([prompt(50)], [(0, 40)], id="a lone prompt is cut at the lone budget"),
        pytest.param([prompt(50, 40)], [(0, 10)], id="a cut prompt continues where it was cut"),
        pytest.param([prompt(30), prompt(30)], [(0, 30), (1, 10)], id="the first prompt goes first"),
        pytest.param([prompt(50), prompt(5)], [(0, 40)], id="a short prompt does not overtake"),
        pytest.param([prompt(30), DECODE], [(1, 1), (0, 9)], id="beside a decode a prompt gets what the budget leaves"),
        pytest.param([*[DECODE] * 9, prompt(9)], [*[(i, 1) for i in range(9)], (9, 4)], id="prefill never starves"),
        pytest.param([*[DECODE] * 12], [(i, 1) for i in range(12)], id="no decode is left out"),
        pytest.param([prompt(1), prompt(50)], [(0, 1), (1, 39)], id="a one-token prompt is a prefill, no decode"),
        pytest.param(
            [prompt(50), guest_prompt("b", 5)], [(0, 5), (1, 5)], id="another tenant's short prompt does not wait"
        ),
        pytest.param(
            [prompt(50), prompt(50), guest_prompt("b", 50)], [(0, 5), (2, 5)], id="owner and guest have equal parts"
        ),
        pytest.param(
            [guest_prompt("b", 50), guest_prompt("c", 2), guest_prompt("d", 50)],
            [(0, 4), (1, 2), (2, 4)],
            id="unused parts are shared",
        ),
        pytest.param(
            [guest_prompt("b", 50), guest_prompt("c", 50), prompt(50)],
            [(0, 3), (1, 2), (2, 5)],
            id="the owner has half",
        ),
        pytest.param([guest_prompt("b", 2), prompt(50)], [(0, 2), (1, 8)], id="the owner also gets what guests leave"),
        pytest.param(
            [*[DECODE] * 9, *map(guest_prompt, "abcdef", [9] * 6)],
            [*[(i, 1) for i in range(9)], *[(i, 1) for i in range(9, 13)]],
            id="with more tenants than tokens, the first tenants get one token each",
        ),
        pytest.param(
            [prompt(2), guest_prompt("b", 50)],
            [(0, 2), (1, 4)],
            id="a guest gets at most the minimum beside a short owner prompt",
        ),
        pytest.param(
            [prompt(4), guest_prompt("b", 9), guest_prompt("c", 9)],
            [(0, 4), (1, 2), (2, 2)],
            id="all guests together get at most as much as the owner",
        ),
        pytest.param([guest_prompt("b", 50)], [(0, 10)], id="a guest's lone prompt is cut at the mixed budget"),
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
    plan = plan_step(running, BUDGET)
    indices = [allotment.index for allotment in plan]
    assert len(set(indices)) == len(indices)
    decodes = [index for index, state in enumerate(running) if state.is_decode]
    assert indices[: len(decodes)] == decodes
    assert all(1 <= allotment.count <= running[allotment.index].uncomputed_tokens for allotment in plan)
    prefill = sum(allotment.count for allotment in plan[len(decodes) :])
    assert prefill <= BUDGET.prefill_tokens(len(decodes))
    if len(decodes) < len(running):
        assert prefill > 0


@pytest.mark.parametrize("budget", [CPU_BUDGET, CUDA_BUDGET], ids=["on a CPU", "on a CUDA device"])
def test_prompts_progress_beside_decodes(budget: Budget) -> None:
    """Prompts progress beside any number of decodes, and get more of a step when alone."""
    assert budget.prefill_tokens(10_000) == budget.min_prefill_tokens > 0
    assert budget.prefill_tokens(0) > budget.prefill_tokens(1)
