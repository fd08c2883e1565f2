"""Cancelling at any moment frees the request's blocks within the step and affects no other request."""

import pytest

from runtime.drivers.interface import Cancelled, Event, Generated
from runtime.drivers.schedule_policy import Budget
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import engine, greedy, prompts, reference, tokens_of

CRUMBS = Budget(23, 7, 5)


@pytest.mark.parametrize("steps", [0, 1, 4, 10, 20], ids=lambda steps: f"after {steps} steps")
def test_frees_blocks_within_a_step(steps: int) -> None:
    """A request that waits, prefills or decodes frees its blocks at once, and the next step reports it."""
    machine = engine(budget=CRUMBS)
    assert machine.admit(greedy("a", prompts()[5])) is None
    for _ in range(steps):
        machine.step()
    machine.cancel("a")
    assert machine.kv_blocks_free == machine.kv_blocks_total
    machine.check_integrity()
    (event,) = machine.step()
    assert isinstance(event, Cancelled)
    assert event.request_id == "a"
    assert not machine.has_work


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("steps", [0, 2, 9])
def test_cancelling_one_request_leaves_others_unchanged(victim: int, steps: int) -> None:
    machine = engine(budget=CRUMBS)
    some = prompts()[2:6]
    events: list[Event] = []
    for index, prompt in enumerate(some):
        assert machine.admit(greedy(str(index), prompt)) is None
    for _ in range(steps):
        events.extend(machine.step())
    machine.cancel(str(victim))
    events.extend(run_to_end(machine))
    for index, prompt in enumerate(some):
        if index != victim:
            assert tokens_of(events, str(index)) == reference("llama", prompt)


def test_cancelling_frees_a_slot_for_a_waiting_request() -> None:
    """The blocks of a cancelled request go to the next one in the next step."""
    machine = engine(blocks=4)
    assert machine.admit(greedy("big", prompts()[5], 24)) is None
    assert machine.admit(greedy("next", prompts()[5], 24)) is None
    machine.step()
    assert (machine.running, machine.waiting) == (1, 1)
    machine.cancel("big")
    machine.step()
    assert (machine.running, machine.waiting) == (1, 0)
    assert tokens_of(run_to_end(machine), "next") == reference("llama", prompts()[5])[1:]


def test_no_token_follows_a_cancellation() -> None:
    """`Cancelled` is a request's last event, and carries its cost."""
    machine = engine()
    assert machine.admit(greedy("a", prompts()[2])) is None
    before = [*machine.step(), *machine.step()]
    machine.cancel("a")
    after = run_to_end(machine)
    assert [type(event) for event in [*before, *after]] == [Generated, Generated, Cancelled]
    assert after[0].counts.completion_tokens == 2
    assert after[0].counts == before[-1].counts


def test_cancelling_unknown_or_ended_request_does_nothing() -> None:
    machine = engine()
    machine.cancel("nobody")
    assert machine.admit(greedy("a", [1])) is None
    machine.cancel("a")
    machine.cancel("a")
    assert len(machine.step()) == 1
    machine.cancel("a")
    assert machine.step() == ()


def test_an_id_may_come_again() -> None:
    machine = engine()
    assert machine.admit(greedy("a", prompts()[2])) is None
    machine.step()
    machine.cancel("a")
    assert machine.admit(greedy("a", prompts()[3])) is None
    assert tokens_of(run_to_end(machine), "a") == reference("llama", prompts()[3])
