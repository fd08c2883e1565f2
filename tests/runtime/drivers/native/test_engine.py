"""How the engine's answers end, what it refuses, and that its counts and costs are exact."""

from dataclasses import replace
from typing import Any

import pytest

from kelvin.contracts.errors import CapacityExceeded, Failure, InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.interface import Event, Finished, GenerationRequest, Sampling
from runtime.drivers.native.engine import ModelEngine
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE
from runtime.drivers.schedule_policy import Budget
from tests.runtime.driving import StepClock, check_progress, run_to_end
from tests.runtime.tiny_decoders import CONFIGS, NEW, VOCAB, engine, greedy, prompts, reason_of, reference, tokens_of


def test_stop_id_ends_the_answer() -> None:
    """A stop id is neither handed out nor counted; the answer ends with reason `stop` and its blocks are free."""
    prompt = prompts()[3]
    want = reference("llama", prompt)
    stop = want[5]
    first = want.index(stop)
    machine = engine()
    assert machine.admit(greedy("a", prompt, stop=[stop])) is None
    events = run_to_end(machine)
    assert tokens_of(events, "a") == want[:first]
    assert reason_of(events, "a") == "stop"
    assert events[-1].counts.completion_tokens == first
    assert machine.kv_blocks_free == machine.kv_blocks_total


@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
def test_length_ends_the_answer(max_tokens: int) -> None:
    """Exactly `max_tokens` tokens, then `length`."""
    machine = engine()
    assert machine.admit(greedy("a", prompts()[2], max_tokens)) is None
    events = run_to_end(machine)
    assert tokens_of(events, "a") == reference("llama", prompts()[2])[:max_tokens]
    assert reason_of(events, "a") == "length"


def sampled(request_id: str, prompt: tuple[int, ...], seed: int | None, **how: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_ids=prompt, sampling=Sampling(max_tokens=NEW, seed=seed, **how)
    )


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="plain"),
        pytest.param({"top_k": 20, "temperature": 0.8}, id="top-k"),
        pytest.param({"top_p": 0.9, "temperature": 1.5}, id="top-p"),
    ],
)
def test_seed_gives_the_same_tokens(how: dict[str, Any]) -> None:
    """The same seed gives the same tokens, alone and among other requests. Another seed gives others."""
    alone = engine()
    assert alone.admit(sampled("a", prompts()[4], 5, **how)) is None
    want = tokens_of(run_to_end(alone), "a")

    crowd = engine(budget=Budget(23, 7, 5))
    for index, prompt in enumerate(prompts()):
        assert crowd.admit(sampled(str(index), prompt, None, top_k=index)) is None
        crowd.step()
    assert crowd.admit(sampled("a", prompts()[4], 5, **how)) is None
    assert crowd.admit(sampled("b", prompts()[4], 6, **how)) is None
    events = run_to_end(crowd)
    assert tokens_of(events, "a") == want
    assert tokens_of(events, "b") != want


def test_without_a_seed_answers_differ() -> None:
    machine = engine()
    for request_id in ("a", "b"):
        assert machine.admit(sampled(request_id, prompts()[4], None, temperature=2.0)) is None
    events = run_to_end(machine)
    assert tokens_of(events, "a") != tokens_of(events, "b")


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        pytest.param(
            greedy("a", range(30), 35),
            CapacityExceeded("KV blocks for prompt plus max_tokens", 4, 3),
            id="more KV than there is at all",
        ),
        pytest.param(
            greedy("a", range(30), 483), LimitExceeded("prompt plus max_tokens", 513, 512, "tokens"), id="past the end"
        ),
        pytest.param(greedy("a", []), InvalidRequest("prompt", "[]", "must hold a token"), id="no prompt"),
        pytest.param(
            greedy("a", [1, VOCAB]),
            InvalidRequest("prompt", "97", "must be a token id from 0 to 96"),
            id="an id outside the vocabulary",
        ),
        pytest.param(
            greedy("a", [-1]), InvalidRequest("prompt", "-1", "must be a token id from 0 to 96"), id="a negative id"
        ),
        pytest.param(
            greedy("a", [1], 0), InvalidRequest("max_tokens", "0", "must be 1 or more"), id="nothing to generate"
        ),
        pytest.param(
            sampled("a", (1,), 0, temperature=float("nan")),
            InvalidRequest("temperature", "nan", "must be 0 or more"),
            id="a temperature that is no number",
        ),
        pytest.param(
            sampled("a", (1,), 0, top_p=0.0),
            InvalidRequest("top_p", "0.0", "must be over 0 and at most 1"),
            id="a top_p of nothing",
        ),
        pytest.param(
            sampled("a", (1,), 0, top_k=-1), InvalidRequest("top_k", "-1", "must be 0 (off) or more"), id="minus top_k"
        ),
    ],
)
def test_refused_at_once(request_: GenerationRequest, want: Failure) -> None:
    """A request that can never run is refused at admission, and leaves nothing behind."""
    machine = engine(blocks=3)
    assert machine.admit(request_) == want
    assert not machine.has_work
    machine.check_integrity()


def test_the_largest_that_fits_runs() -> None:
    """A request that needs exactly all blocks runs."""
    machine = engine(blocks=3)
    assert machine.admit(greedy("a", prompts()[5], 3 * BLOCK_SIZE - 33 + 1)) is None
    assert reason_of(run_to_end(machine), "a") == "length"


def test_request_without_free_blocks_is_not_overtaken() -> None:
    """A request waits for blocks, is not overtaken by a smaller one, and runs when they come free."""
    machine = engine(blocks=4)
    for request_id, prompt in (("first", prompts()[5]), ("big", prompts()[6]), ("small", prompts()[0])):
        assert machine.admit(greedy(request_id, prompt, 10)) is None
    machine.step()
    assert (machine.running, machine.waiting) == (1, 2)
    ended = [event.request_id for event in run_to_end(machine) if isinstance(event, Finished)]
    assert ended == ["first", "big", "small"]


def _of(tenant: str, request_id: str, tokens: int) -> GenerationRequest:
    """Return a request that needs this many KV entries."""
    return replace(greedy(request_id, prompts()[0], tokens - len(prompts()[0]) + 1), tenant=tenant)


def test_guests_leave_kv_blocks_to_the_owner() -> None:
    """Guests leave an eighth of the blocks to the owner, whose requests pass waiting guests."""
    machine = engine(blocks=32)
    for request_id in ("g1", "g2"):
        assert machine.admit(_of("guest", request_id, 14 * BLOCK_SIZE)) is None
    assert machine.admit(_of("guest", "g3", 4 * BLOCK_SIZE)) is None
    machine.step()
    assert (machine.running, machine.waiting, machine.kv_blocks_free) == (2, 1, 4)
    for request_id in ("o1", "o2", "o3"):
        assert machine.admit(_of("", request_id, 2 * BLOCK_SIZE)) is None
    machine.step()
    assert (machine.running, machine.waiting, machine.kv_blocks_free) == (4, 2, 0)
    ended = [event.request_id for event in run_to_end(machine) if isinstance(event, Finished)]
    assert set(ended) == {"g1", "g2", "g3", "o1", "o2", "o3"}


def test_large_guest_request_runs_alone() -> None:
    """Such a guest waits until nothing else runs."""
    machine = engine(blocks=32)
    for request_id in ("g1", "g2"):
        assert machine.admit(_of("guest", request_id, 31 * BLOCK_SIZE)) is None
    machine.step()
    assert (machine.running, machine.waiting) == (1, 1)
    ended = [event.request_id for event in run_to_end(machine) if isinstance(event, Finished)]
    assert ended == ["g1", "g2"]


def test_large_guest_request_does_not_block_other_guests() -> None:
    """Other guests run while it waits for the owner to end."""
    machine = engine(blocks=32)
    assert machine.admit(_of("", "owner", 3 * BLOCK_SIZE)) is None
    machine.step()
    assert machine.admit(_of("guest-a", "large", 31 * BLOCK_SIZE)) is None
    assert machine.admit(_of("guest-b", "small", 2 * BLOCK_SIZE)) is None
    assert machine.admit(_of("guest-a", "its own", 2 * BLOCK_SIZE)) is None
    machine.step()
    assert (machine.running, machine.waiting) == (3, 1)
    ended = [event.request_id for event in run_to_end(machine) if isinstance(event, Finished)]
    assert ended == ["small", "its own", "owner", "large"]


def test_the_queue_is_bounded() -> None:
    """A full queue refuses with Overloaded; an id in use is refused."""
    machine = engine(max_waiting=1)
    assert machine.admit(greedy("a", [1])) is None
    assert machine.admit(greedy("a", [1])) == InvalidRequest("request_id", "a", "is in use")
    assert machine.admit(greedy("b", [1])) == Overloaded("the engine's queue", 1, 1.0)


def test_a_pool_of_nothing_is_refused() -> None:
    """An engine without room for one block does not start."""
    with pytest.raises(Refused) as caught:
        engine(kv_bytes=1000)
    assert isinstance(caught.value.failure, CapacityExceeded)


@pytest.mark.parametrize("step_ns", [1, 999, 1_000, 1_001, 7_654_321])
def test_device_time_sums_exactly(step_ns: int) -> None:
    """Each step's time is divided among its requests by tokens, to the microsecond, and nothing is lost."""
    machine = engine(clock_ns=StepClock(step_ns), budget=Budget(23, 17, 5))
    for index, prompt in enumerate(prompts()):
        assert machine.admit(greedy(str(index), prompt, 5)) is None
    steps = 0
    events: list[Event] = []
    while machine.has_work:
        events.extend(machine.step())
        steps += 1
    assert machine.busy_ns == steps * step_ns
    final = {event.request_id: event.counts for event in events}
    assert sum(counts.device_us for counts in final.values()) == machine.busy_ns // 1000
    machine.check_integrity()
    machine._charged_us += 1  # negative control
    with pytest.raises(AssertionError, match="time is lost"):
        machine.check_integrity()


def test_a_step_is_divided_by_tokens() -> None:
    """A prompt of 15 tokens pays five times what a prompt of 3 tokens pays in the same step."""
    machine = engine(clock_ns=StepClock(18_000_000))
    for request_id, length in (("a", 15), ("b", 3)):
        assert machine.admit(greedy(request_id, range(length), 1)) is None
    final = {event.request_id: event.counts for event in machine.step()}
    assert final == {
        "a": Counts(prompt_tokens=15, completion_tokens=1, device_us=15_000),
        "b": Counts(prompt_tokens=3, completion_tokens=1, device_us=3_000),
    }


def test_counts_are_cumulative() -> None:
    """Of a cut prompt only computed tokens count, and no count ever falls."""
    machine = engine(budget=Budget(8, 8, 1))
    assert machine.admit(greedy("a", prompts()[2], 4)) is None
    machine.step()
    assert machine._running["a"].counts.prompt_tokens == 8
    counts = [event.counts for event in run_to_end(machine)]
    assert [count.completion_tokens for count in counts] == [1, 2, 3, 4, 4]
    assert {count.prompt_tokens for count in counts} == {15}
    assert [count.device_us for count in counts] == sorted(count.device_us for count in counts)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        pytest.param(lambda machine: machine._pool.try_allocate(1), "a block is lost", id="a block without an owner"),
        pytest.param(lambda machine: machine._waiting.update(machine._running), "waits and runs", id="in both queues"),
        pytest.param(
            lambda machine: machine._running["a"].tokens.pop(), "has nothing to compute", id="a token forgotten"
        ),
        pytest.param(
            lambda machine: setattr(machine._running["a"], "blocks", machine._running["b"].blocks),
            "two sequences hold a block",
            id="a block shared",
        ),
    ],
)
def test_integrity_check_goes_red(spoil: Any, rule: str) -> None:
    """Negative control: each disagreement is noticed."""
    machine: ModelEngine = engine()
    for request_id in ("a", "b"):
        assert machine.admit(greedy(request_id, prompts()[1])) is None
    machine.step()
    machine.check_integrity()
    spoil(machine)
    with pytest.raises(AssertionError, match=rule):
        machine.check_integrity()


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_reports_progress_at_each_layer(name: str) -> None:
    """A replica counts as hung if this time stands still, so it must advance with each layer, not once a step."""
    machine = engine(name)
    assert machine.admit(greedy("a", prompts()[7], 1)) is None
    check_progress(machine, CONFIGS[name]["num_hidden_layers"])
