"""Vectors are those of sentence-transformers in any batch, counts and costs are exact, a fault costs one request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.batching_policy import BatchingWindow
from runtime.drivers.interface import Cancelled, Embedded, Event, Failed, Finished, GenerationRequest, Sampling
from runtime.encoder import probe as known_answers
from runtime.encoder.model import EncoderModel
from runtime.encoder.recipe import read_recipe
from runtime.models.binding import find_differences
from tests.runtime.driving import StepClock, check_progress, run_to_end
from tests.runtime.encoder.models import FAMILIES, ask, by_the_library, sequences, tiny, vectors_of

CASES = [
    *((family, "mean_tokens", True) for family in FAMILIES),
    *(("bert", pooling, False) for pooling in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")),
]


@pytest.mark.parametrize(("family", "pooling", "normalize"), CASES)
def test_as_sentence_transformers_has_it(family: str, pooling: str, normalize: bool) -> None:
    """Alone, in one request, and in separate requests of one batch, vectors agree to 1e-5."""
    model = tiny(family, pooling, normalize)
    wanted = by_the_library(model, sequences())
    together, apart = model.engine(), model.engine(max_tokens=150)
    assert together.admit(ask("all", *sequences())) is None
    for at, sequence in enumerate(sequences()):
        assert apart.admit(ask(str(at), sequence)) is None
    events = run_to_end(apart)
    alone = model.engine()
    for at, sequence in enumerate(sequences()):
        assert alone.admit(ask("a", sequence)) is None
        for got in (vectors_of(events, str(at)), vectors_of(run_to_end(alone), "a")):
            assert (got[0] - wanted[at]).abs().max() < 1e-5
    assert (vectors_of(run_to_end(together), "all") - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_reports_progress_at_each_layer(family: str) -> None:
    """A replica counts as hung if this time stands still, so a long text must move it layer by layer."""
    machine = tiny(family).engine()
    assert machine.admit(ask("a", *sequences())) is None
    check_progress(machine, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_encoder_matches_library(dtype: str) -> None:
    """Vectors differ from the library's by at most the probe's tolerance."""
    model = tiny("bert", dtype=dtype)
    probe = known_answers.record(model.bound("library"), read_recipe(model.files))
    machine = model.engine(probe=probe)
    assert machine.run_probe_alone() is None
    assert machine.admit(ask("a", *sequences())) is None
    wanted = by_the_library(model, sequences())
    assert (vectors_of(run_to_end(machine), "a") - wanted).abs().max() <= probe.tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_is_the_library_exactly(family: str) -> None:
    model = tiny(family)
    assert find_differences(model.bound("fast").module, model.bound("library").module) == ()


def test_padding_that_is_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if padding counts as text, a short text beside a long one goes wrong."""
    model = tiny()
    embed = EncoderModel.embed

    def padded(self: EncoderModel, rows: Any) -> torch.Tensor:
        longest = max(map(len, rows))
        return embed(self, [(*row, *[self._pad] * (longest - len(row))) for row in rows])

    monkeypatch.setattr(EncoderModel, "embed", padded)
    machine = model.engine()
    assert machine.admit(ask("a", *sequences())) is None
    off = (vectors_of(run_to_end(machine), "a") - by_the_library(model, sequences())).abs().amax(1)
    assert (off > 1e-3).sum() >= 5


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        pytest.param([], InvalidRequest("input", "[]", "must hold a text"), id="no input"),
        pytest.param([()], InvalidRequest("input", "[]", "must hold a token"), id="an empty input"),
        pytest.param([(4,), (64,)], InvalidRequest("input", "64", "must be a token id under 64"), id="a strange id"),
        pytest.param([(-1,)], InvalidRequest("input", "-1", "must be a token id under 64"), id="a negative id"),
        pytest.param([(4,) * 65], LimitExceeded("input", 65, 64, "tokens"), id="too long"),
    ],
)
def test_refused_at_once(rows: list[tuple[int, ...]], want: Failure) -> None:
    """A wrong input is refused before any compute, and leaves nothing behind."""
    machine = tiny().engine()
    assert machine.admit(ask("a", *rows)) == want
    assert not machine.has_work


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    """A full queue, an id in use, and a generation request are refused."""
    machine = tiny().engine(max_waiting=1)
    assert machine.admit(ask("a", (4,))) is None
    assert machine.admit(ask("a", (4,))) == InvalidRequest("request_id", "a", "is in use")
    assert machine.admit(ask("b", (4,))) == Overloaded("the engine's queue", 1, 1.0)
    other = GenerationRequest(request_id="c", prompt_ids=(4,), sampling=Sampling(max_tokens=1))
    assert machine.admit(other) == Internal()


ROW = (4,) * 25


def _ended(events: Sequence[Event]) -> set[str]:
    return {event.request_id for event in events if isinstance(event, Finished)}


def test_request_of_many_rows_does_not_delay_others() -> None:
    """While four requests fill each forward, a fifth one of one row is done within two forwards."""
    machine = tiny().engine(max_tokens=100)
    for request_id in "abcd":
        assert machine.admit(ask(request_id, *[ROW] * 6)) is None
    machine.step()
    assert machine.admit(ask("late", ROW)) is None
    assert "late" in _ended([*machine.step(), *machine.step()])
    assert _ended(run_to_end(machine)) == set("abcd")


def test_tenants_take_turns() -> None:
    """However many requests a guest has, the owner and another guest are in the next forward."""
    machine = tiny().engine(max_tokens=100)
    for number in range(20):
        assert machine.admit(replace(ask(f"g{number}", ROW), tenant="guest")) is None
    machine.step()
    assert machine.admit(ask("owner", *[ROW] * 2)) is None
    assert machine.admit(replace(ask("other", ROW), tenant="other")) is None
    assert _ended(machine.step()) == {"g4", "g5", "other"}  # and the owner's first row
    assert "owner" in _ended(machine.step())
    assert len(_ended(run_to_end(machine))) == 11


def test_faulty_request_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed forward is repeated per request. A request that fails alone too, or gives NaN, fails."""
    model, embed, three = tiny(), EncoderModel.embed, sequences()[:3]

    def faulty(self: EncoderModel, rows: Any) -> torch.Tensor:
        if three[1] in rows:
            raise RuntimeError("boom")
        found = embed(self, rows).clone()
        found[[row == three[2] for row in rows]] = torch.nan
        return found

    monkeypatch.setattr(EncoderModel, "embed", faulty)
    machine = model.engine()
    for name, row in zip("abc", three, strict=True):
        assert machine.admit(ask(name, row)) is None
    events = run_to_end(machine)
    assert {event.request_id: type(event) for event in events} == {"a": Finished, "b": Failed, "c": Failed}
    assert (vectors_of(events, "a") - by_the_library(model, three[:1])).abs().max() < 1e-5


@pytest.mark.parametrize("step_ns", [1, 999, 1_000_001])
def test_device_time_sums_exactly(step_ns: int) -> None:
    """Each forward's time is divided by tokens, and nothing is lost. Counts are the input tokens."""
    machine = tiny().engine(clock_ns=StepClock(step_ns), max_tokens=100)
    for at, sequence in enumerate(sequences()):
        assert machine.admit(ask(str(at), sequence, sequence[:3])) is None
    final = {event.request_id: event.counts for event in run_to_end(machine)}
    assert sum(counts.device_us for counts in final.values()) == machine.busy_ns // 1000
    assert [final[str(at)].prompt_tokens for at in range(8)] == [len(row) + 3 for row in sequences()]
    assert not any(counts.completion_tokens for counts in final.values())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.lists(st.integers(0, 7), min_size=1, max_size=5)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=25,
)


@given(actions=ACTIONS, max_tokens=st.integers(1, 300))
@settings(max_examples=15)
def test_any_schedule(actions: list[tuple[str, Any]], max_tokens: int) -> None:
    """In any schedule each request ends once, with all its vectors in order, or the first of them if cancelled."""
    model = tiny()
    wanted, machine = by_the_library_once(), model.engine(max_tokens=max_tokens)
    asked: dict[str, list[int]] = {}
    events: list[Event] = []
    for kind, what in actions:
        if kind == "arrive":
            asked[str(len(asked))] = what
            assert machine.admit(ask(str(len(asked) - 1), *(sequences()[at] for at in what))) is None
        elif kind == "cancel":
            machine.cancel(str(what))
        else:
            events.extend(machine.step())
            machine.check_integrity()
    events.extend(run_to_end(machine))
    for request_id, rows in asked.items():
        mine = [event for event in events if event.request_id == request_id]
        got = [event for event in mine if isinstance(event, Embedded)]
        (last,) = mine[len(got) :]
        if got:
            assert (vectors_of(events, request_id) - wanted[rows[: len(got)]]).abs().max() < 1e-5
        if isinstance(last, Finished):
            assert len(got) == len(rows)
        else:
            assert isinstance(last, Cancelled)


_ONCE: list[torch.Tensor] = []


def by_the_library_once() -> torch.Tensor:
    """Return the library's vectors of all sequences."""
    if not _ONCE:
        _ONCE.append(by_the_library(tiny(), sequences()))
    return _ONCE[0]


def test_the_probe_rides_in_the_first_batch() -> None:
    """The probe needs no forward of its own, and its time is charged to no request."""
    model = tiny()
    probe = known_answers.record(model.bound("library"), read_recipe(model.files))
    machine = model.engine(probe=probe, clock_ns=StepClock(1_000_000))
    due = [machine.needs_probe]
    assert machine.admit(ask("a", sequences()[0])) is None
    (_, last) = machine.step()
    assert isinstance(last, Finished)
    assert [*due, machine.needs_probe] == [True, False]
    assert last.counts.device_us < machine.busy_ns // 1000


def test_no_vector_of_a_failed_probe_leaves() -> None:
    """A failed probe fails requests inside, and refuses later ones."""
    model = tiny()
    probe = known_answers.record(model.bound("library"), read_recipe(model.files))
    spoilt = type(probe)(
        token_ids=probe.token_ids, top_ids=(), top_logits=(), tolerance=probe.tolerance,
        vector=(probe.vector[0] + 0.1, *probe.vector[1:]),
    )  # fmt: skip
    machine = model.engine(probe=spoilt)
    assert machine.admit(ask("a", sequences()[0])) is None
    (event,) = machine.step()
    assert isinstance(event, Failed)
    assert isinstance(event.failure, ProbeFailed)
    assert machine.admit(ask("b", sequences()[0])) == event.failure
    machine.check_integrity()
    shorter = known_answers.verify(probe, torch.zeros(3))
    assert shorter == "3 dimensions instead of 32"
    assert known_answers.verify(probe, torch.full((32,), torch.nan)) == "a vector that is not finite"


def test_first_request_waits_within_the_window() -> None:
    """`batching_delay_s` counts down from the first arrival, and is 0 once a forward is full."""
    now = [0]
    machine = tiny().engine(
        clock_ns=lambda: now[0], max_tokens=20, window=BatchingWindow(wait_s=0.004, single_request_s=0.01)
    )
    assert machine.batching_delay_s == 0
    assert machine.admit(ask("a", sequences()[0])) is None
    assert machine.batching_delay_s == pytest.approx(0.004)
    now[0] = 3_000_000
    assert machine.batching_delay_s == pytest.approx(0.001)
    assert machine.admit(ask("b", sequences()[4])) is None  # does not fit beside it
    assert machine.batching_delay_s == 0
    machine.cancel("b")
    machine.step()
    assert machine.batching_delay_s == 0
    machine.check_integrity()
    machine._charged_us += 1  # negative control
    with pytest.raises(AssertionError, match="time is lost"):
        machine.check_integrity()
