"""One bad request fails alone, a lost device fails all, and the probe keeps wrong tokens back."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.errors import Internal, Unavailable
from runtime.drivers.interface import Event, Failed, Generated
from runtime.drivers.native.engine import ModelEngine
from runtime.drivers.schedule_policy import Budget
from runtime.models import probe as known_answers
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import (
    VOCAB,
    TinyModel,
    engine,
    failures_of,
    greedy,
    prompts,
    reference,
    tiny,
    tokens_of,
)

SOME = prompts()[2:6]
ANSWERS = {token for prompt in SOME for token in (*prompt, *reference("llama", prompt))}
BAD_TOKEN = next(token for token in range(VOCAB) if token not in ANSWERS)  # a token that no other request uses


def with_tensor(name: str, change: Callable[[torch.Tensor], None], model: TinyModel | None = None) -> TinyModel:
    """The tiny Llama with one tensor changed."""
    model = model or tiny("llama")
    changed = model.tensors[name].clone()
    change(changed)
    return TinyModel(model.config_json, {**model.tensors, name: changed}, model.dtype)


def nan_row(tensor: torch.Tensor) -> None:
    tensor[BAD_TOKEN] = float("nan")


def raising_machine(
    when: Callable[[torch.Tensor], bool], error: Callable[[], Exception], **options: Any
) -> ModelEngine:
    """An engine whose embedding raises for some input ids."""
    bound = tiny("llama").bound()

    def hook(_: object, args: tuple[torch.Tensor, ...]) -> None:
        if when(args[0]):
            raise error()

    embedding: Any = bound.module.get_submodule("model.embed_tokens")
    embedding.register_forward_pre_hook(hook)
    return engine(bound=bound, **options)


def has_bad_token(ids: torch.Tensor) -> bool:
    return bool((ids == BAD_TOKEN).any())


def serve_with_bad_one(machine: ModelEngine, joins_after: int) -> list[Event]:
    events: list[Event] = []
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    for _ in range(joins_after):
        events.extend(machine.step())
    assert machine.admit(greedy("bad", [1, 2, BAD_TOKEN, 3])) is None
    return [*events, *run_to_end(machine)]


@pytest.mark.parametrize("joins_after", [0, 1, 5], ids=lambda steps: f"joining after {steps} steps")
@pytest.mark.parametrize("budget", [None, Budget(9, 9, 3)], ids=["prompts whole", "prompts cut"])
@pytest.mark.parametrize("kind", ["NaN", "exception"])
def test_bad_request_fails_alone(kind: str, joins_after: int, budget: Budget | None) -> None:
    """A request with NaN logits, or an exception, fails alone. Others get `generate`'s tokens."""
    if kind == "NaN":
        model = with_tensor("model.embed_tokens.weight", nan_row)
        machine = engine(bound=model.bound(), budget=budget)
    else:
        machine = raising_machine(has_bad_token, lambda: RuntimeError("a bad row"), budget=budget)
    events = serve_with_bad_one(machine, joins_after)
    assert failures_of(events) == {"bad": Internal()}
    assert tokens_of(events, "bad") == ()
    for index, prompt in enumerate(SOME):
        assert tokens_of(events, str(index)) == reference("llama", prompt)
    assert machine.kv_blocks_free == machine.kv_blocks_total
    assert machine.poisoned is None


def test_blocks_that_held_nan_are_clean_for_the_next() -> None:
    machine = engine(bound=with_tensor("model.embed_tokens.weight", nan_row).bound(), blocks=4)
    assert machine.admit(greedy("bad", [BAD_TOKEN] * 60, 2)) is None
    run_to_end(machine)
    assert machine.admit(greedy("good", SOME[0])) is None
    assert tokens_of(run_to_end(machine), "good") == reference("llama", SOME[0])


def test_forward_that_always_raises_fails_all_requests() -> None:
    """If every row raises, all requests fail, and the engine takes the next one."""
    broken = True
    machine = raising_machine(lambda _: broken, lambda: RuntimeError("all of it"))
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    assert failures_of(run_to_end(machine)) == {str(index): Internal() for index in range(len(SOME))}
    broken = False
    assert machine.admit(greedy("a", SOME[0])) is None
    assert tokens_of(run_to_end(machine), "a") == reference("llama", SOME[0])


def test_a_lost_device_poisons() -> None:
    """A lost device fails all requests, also later ones."""
    machine = raising_machine(has_bad_token, lambda: torch.AcceleratorError("lost", 700), max_running=2)
    events = serve_with_bad_one(machine, 0)
    assert set(failures_of(events)) >= {"bad"}
    assert machine.poisoned == Internal()
    assert machine.admit(greedy("later", [1])) == Internal()
    assert machine.kv_blocks_free == machine.kv_blocks_total


def test_fail_all_ends_every_request() -> None:
    machine = engine(max_running=2)
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    machine.step()
    machine.fail_all(Unavailable("this replica"))
    assert failures_of(machine.step()) == {str(index): Unavailable("this replica") for index in range(len(SOME))}
    machine.check_integrity()
    assert not machine.has_work


def flipped(name: str, index: tuple[int, ...], bit: int) -> TinyModel:
    """Flip one bit of a float32 weight. Bits 23 to 30 are the exponent."""

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(torch.int32)[index] ^= 1 << bit

    return with_tensor(name, flip)


FLIPS = [
    pytest.param(flipped("model.layers.1.mlp.down_proj.weight", (5, 3), 24), id="0.44 becomes 1.7 in a projection"),
    pytest.param(flipped("model.layers.0.self_attn.k_proj.weight", (5, 3), 24), id="0.07 becomes 0.02 in a key"),
    pytest.param(flipped("model.norm.weight", (3,), 29), id="1 becomes 5e-20 in the last norm"),
]
OVERFLOWING = flipped("model.layers.1.mlp.down_proj.weight", (5, 3), 30)


PROBE = known_answers.record(tiny("llama").bound("library"))


@pytest.mark.parametrize("budget", [None, Budget(9, 9, 3)], ids=["prompts whole", "prompts cut"])
def test_probe_rides_in_the_first_batch(budget: Budget | None) -> None:
    """With the right model the probe matches, changes no answer, and its time is charged to no request."""
    machine = engine(probe=PROBE, budget=budget)
    due = machine.needs_probe
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = list(machine.step())
    assert (due, machine.needs_probe) == (True, False)
    charged = sum(sequence.device_us for sequence in machine._running.values())
    assert 0 < charged < machine.busy_ns // 1000
    events += run_to_end(machine)
    for index, prompt in enumerate(SOME):
        assert tokens_of(events, str(index)) == reference("llama", prompt)
    assert machine.poisoned is None


@pytest.mark.parametrize("model", [*FLIPS, pytest.param(OVERFLOWING, id="0.44 becomes 1.5e38")])
def test_no_token_of_a_failed_probe_leaves(model: TinyModel) -> None:
    """With a flipped exponent bit every request fails, no token leaves, and later requests are refused."""
    machine = engine(bound=model.bound(), probe=PROBE, max_running=2)
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = run_to_end(machine)
    assert not any(isinstance(event, Generated) for event in events)
    failures = failures_of(events)
    assert set(failures) == {str(index) for index in range(len(SOME))}
    assert all(isinstance(failure, ProbeFailed) for failure in failures.values())
    assert machine.admit(greedy("later", [1])) == machine.poisoned == failures["0"]
    assert machine.kv_blocks_free == machine.kv_blocks_total


@pytest.mark.parametrize("model", FLIPS)
def test_without_probe_wrong_tokens_leave(model: TinyModel) -> None:
    """Negative control: with the probe off, the flipped bit's answers go out, and they are wrong."""
    machine = engine(bound=model.bound())
    for index, prompt in enumerate(SOME):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = run_to_end(machine)
    wrong = [tokens_of(events, str(index)) != reference("llama", prompt) for index, prompt in enumerate(SOME)]
    assert any(wrong)
    assert not failures_of(events)


@pytest.mark.parametrize(("model", "good"), [(tiny("llama"), True), (OVERFLOWING, False)], ids=["right", "flipped"])
def test_probe_without_a_request_runs_once(model: TinyModel, good: bool) -> None:
    """Without a request the probe runs once, alone. Then the engine serves, or refuses for good."""
    machine = engine(bound=model.bound(), probe=PROBE)
    failure = machine.run_probe_alone()
    assert (failure is None) == good == (machine.poisoned is None)
    assert not machine.needs_probe
    busy_ns = machine.busy_ns
    assert busy_ns > 0
    assert machine.run_probe_alone() == failure
    assert machine.busy_ns == busy_ns
    refusal = machine.admit(greedy("a", SOME[0]))
    assert refusal == failure
    assert tokens_of(run_to_end(machine), "a") == (reference("llama", SOME[0]) if good else ())
    machine.check_integrity()


def test_probe_survives_a_bad_companion() -> None:
    """A request whose row raises in the first batch fails alone; the probe is verified all the same."""
    machine = raising_machine(has_bad_token, lambda: RuntimeError("a bad row"), probe=PROBE)
    events = serve_with_bad_one(machine, 0)
    assert failures_of(events) == {"bad": Internal()}
    assert machine.poisoned is None
    assert not machine.needs_probe


def test_probe_has_a_block_of_its_own() -> None:
    """A request that needs the whole pool is answered despite the probe."""
    machine = engine(probe=PROBE, blocks=1)
    prompt = min(prompts(), key=len)
    assert machine.admit(greedy("a", prompt, 6)) is None
    assert machine.step()
    assert machine.kv_blocks_free == 0
    assert tokens_of(run_to_end(machine), "a") == reference("llama", prompt)[1:6]


def test_probe_that_raises_poisons() -> None:
    machine = raising_machine(lambda ids: PROBE.token_ids[0] in ids, lambda: RuntimeError("a bad row"), probe=PROBE)
    assert isinstance(machine.run_probe_alone(), ProbeFailed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama tied", "llama3 rope", "qwen2", "qwen2 with windows"])
def test_probe_of_the_library_matches_ours(name: str, dtype: torch.dtype) -> None:
    """The library's known answers match our engine, alone and in a batch."""
    probe = known_answers.record(tiny(name, dtype).bound("library"))
    assert engine(name, dtype=dtype, probe=probe).run_probe_alone() is None
    crowd = engine(name, dtype=dtype, probe=probe)
    for index, prompt in enumerate(prompts()):
        assert crowd.admit(greedy(str(index), prompt, 2)) is None
    assert not [event for event in run_to_end(crowd) if isinstance(event, Failed)]


def test_integrity_of_a_poisoned_engine() -> None:
    """Negative control: a poisoned engine that still held requests would be noticed."""
    machine = engine()
    assert machine.admit(greedy("a", [1])) is None
    machine._poisoned = Internal()
    with pytest.raises(AssertionError, match="poisoned"):
        machine.check_integrity()


def test_lost_while_reading_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run asynchronously, so a lost device may show when tokens are read."""

    def lost(*_: object) -> Mapping[str, Any]:
        raise torch.AcceleratorError("lost", 700)

    monkeypatch.setattr("runtime.drivers.native.engine.choose_tokens", lost)
    machine = engine()
    assert machine.admit(greedy("a", [1, 2])) is None
    assert failures_of(machine.step()) == {"a": Internal()}
    assert machine.poisoned == Internal()
    machine.check_integrity()
