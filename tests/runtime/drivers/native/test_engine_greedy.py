"""The engine's greedy answers are those of transformers, alone and in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drivers.interface import Event, Finished, Generated
from runtime.drivers.native import batch, sdpa_backend
from runtime.drivers.schedule_policy import Budget
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import CONFIGS, NEW, engine, greedy, prompts, reason_of, reference, tiny, tokens_of

BUDGETS = [
    pytest.param(None, id="prompts whole"),
    pytest.param(Budget(64, 64, 16), id="prompts cut at 64"),
    pytest.param(Budget(23, 7, 5), id="prompts cut into crumbs"),
]


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", prompts(), ids=lambda prompt: f"{len(prompt)} tokens")
def test_one_request_gets_the_tokens_of_generate(name: str, prompt: tuple[int, ...]) -> None:
    machine = engine(name)
    assert machine.admit(greedy("a", prompt)) is None
    assert tokens_of(run_to_end(machine), "a") == reference(name, prompt)


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_ten_requests_get_the_tokens_of_generate(name: str, budget: Budget | None) -> None:
    """Each of ten requests gets them, however the prompts are cut."""
    machine = engine(name, budget=budget)
    for index, prompt in enumerate(prompts()):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = run_to_end(machine)
    for index, prompt in enumerate(prompts()):
        assert tokens_of(events, str(index)) == reference(name, prompt)
        assert reason_of(events, str(index)) == "length"
    assert machine.kv_blocks_free == machine.kv_blocks_total


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_late_request_gets_the_tokens_of_generate(name: str, budget: Budget | None) -> None:
    """So does a request that joins while others decode."""
    machine = engine(name, budget=budget)
    events: list[Event] = []
    for index, prompt in enumerate(prompts()):
        assert machine.admit(greedy(str(index), prompt)) is None
        for _ in range(3):
            events.extend(machine.step())
            machine.check_integrity()
    events.extend(run_to_end(machine))
    for index, prompt in enumerate(prompts()):
        assert tokens_of(events, str(index)) == reference(name, prompt)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, len(prompts()) - 1), st.integers(1, NEW)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    ),
    max_size=40,
)


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    actions=ACTIONS,
    budget=st.builds(Budget, st.integers(1, 60), st.integers(1, 80), st.integers(1, 20)),
    blocks=st.integers(6, 20),
    max_running=st.integers(1, 6),
)
@settings(max_examples=30)
def test_any_schedule(
    name: str, actions: list[tuple[str, int, int]], budget: Budget, blocks: int, max_running: int
) -> None:
    """In any schedule each request gets `generate`'s tokens, or the first of them if cancelled.
    Integrity holds after each step, each request ends once, and no block is lost."""
    machine = engine(name, blocks=blocks, budget=budget, max_running=max_running)
    asked: dict[str, tuple[tuple[int, ...], int]] = {}
    events: list[Event] = []
    cancelled: set[str] = set()
    for kind, number, max_tokens in actions:
        if kind == "arrive":
            request_id = str(len(asked))
            asked[request_id] = prompts()[number], max_tokens
            assert machine.admit(greedy(request_id, *asked[request_id])) is None
        elif kind == "cancel":
            machine.cancel(str(number))
            cancelled.add(str(number))
        else:
            for _ in range(number):
                events.extend(machine.step())
                machine.check_integrity()
    events.extend(run_to_end(machine))
    assert machine.kv_blocks_free == machine.kv_blocks_total
    for request_id, (prompt, max_tokens) in asked.items():
        got, last = tokens_of(events, request_id), [event for event in events if event.request_id == request_id][-1]
        if isinstance(last, Finished):
            assert got == reference(name, prompt)[:max_tokens]
        else:
            assert request_id in cancelled
            assert got == reference(name, prompt)[: len(got)]
        assert last.counts.completion_tokens == len(got)
    ends = [event.request_id for event in events if not isinstance(event, Generated)]
    assert sorted(ends) == sorted(asked)


def test_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the upper-left mask of `is_causal`, cut prompts go wrong."""

    def upper_left(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        return torch.ones(count, length, dtype=torch.bool).tril()

    monkeypatch.setattr(sdpa_backend, "_lower_right_mask", upper_left)
    machine = engine(budget=Budget(23, 7, 5))
    assert machine.admit(greedy("a", prompts()[7])) is None
    assert tokens_of(run_to_end(machine), "a") != reference("llama", prompts()[7])


def test_shared_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sequences that write to one another's blocks go wrong."""
    own = batch.slots_in_blocks
    monkeypatch.setattr(batch, "slots_in_blocks", lambda blocks, device: own(range(len(blocks)), device))
    machine = engine()
    for index, prompt in enumerate(prompts()):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = run_to_end(machine)
    assert any(tokens_of(events, str(index)) != reference("llama", p) for index, p in enumerate(prompts()))


def test_bfloat16_request_gets_the_tokens_of_generate() -> None:
    """In bfloat16 a request alone gets the tokens of `generate`, nearly always: rounding may break a tie elsewhere."""
    equal = 0
    for index, prompt in enumerate(prompts()):
        machine = engine(dtype=torch.bfloat16)
        assert machine.admit(greedy(str(index), prompt)) is None
        got, want = tokens_of(run_to_end(machine), str(index)), reference("llama", prompt, torch.bfloat16)
        assert len(got) == NEW
        equal += sum(a == b for a, b in zip(got[:4], want[:4], strict=True))
    assert equal >= 0.8 * 4 * len(prompts())


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_never_written(name: str) -> None:
    """After serving, every tensor is what it was."""
    model = tiny(name)
    before = {key: tensor.clone() for key, tensor in model.tensors.items()}
    test_ten_requests_get_the_tokens_of_generate(name, None)
    for key, tensor in model.tensors.items():
        assert torch.equal(tensor, before[key]), key
