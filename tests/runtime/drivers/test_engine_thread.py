"""The engine's thread: a bounded inbox, ordered events, busy spells, and an end for every request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.errors import Internal, InvalidRequest, Refused, Unavailable
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.engine_thread import EngineThread
from runtime.drivers.interface import Cancelled, Engine, Event, Failed, Finished, Generated
from tests.runtime.driving import EventRecorder
from tests.runtime.scripted_engine import DEADLINE_S, ScriptedEngine
from tests.runtime.tiny_decoders import engine, greedy, prompts, reference, tokens_of


def counting(**options: bool) -> ScriptedEngine:
    """Return an engine that generates as many tokens as requested."""
    return ScriptedEngine(lambda request: range(request.sampling.max_tokens), **options)


@contextmanager
def running(
    machine: Engine, *, limit: int = 8, probe_after_s: float = 0.0
) -> Iterator[tuple[EngineThread, EventRecorder]]:
    recorder = EventRecorder()
    thread = EngineThread(
        machine, on_events=recorder.on_events, on_busy=recorder.on_busy, max_requests=limit, probe_after_s=probe_after_s
    )
    thread.start()
    try:
        yield thread, recorder
    finally:
        if isinstance(machine, ScriptedEngine):
            machine.run_freely()
        assert thread.stop(DEADLINE_S)


def test_serves_a_real_engine() -> None:
    """Through the thread, from several submitters at once, each gets `generate`'s tokens."""
    with running(engine(), limit=64) as (thread, recorder):
        submitters = [
            threading.Thread(target=thread.submit, args=(greedy(str(index), prompt),))
            for index, prompt in enumerate(prompts())
        ]
        for submitter in submitters:
            submitter.start()
        recorder.wait_for_ends(len(submitters))
        for submitter in submitters:
            submitter.join(DEADLINE_S)
    for index, prompt in enumerate(prompts()):
        assert tokens_of(recorder.events, str(index)) == reference("llama", prompt)


def test_everything_happens_in_one_thread() -> None:
    machine = counting()
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 3))
        recorder.wait_for_ends(1)
    assert len(machine.threads) == 1
    assert threading.get_ident() not in machine.threads


def test_a_full_inbox_refuses_and_never_blocks() -> None:
    """During a step, `limit` requests are accepted and the next is refused at once. An end frees a place."""
    machine = counting(paced=True)
    with running(machine, limit=3) as (thread, recorder):
        thread.submit(greedy("a", [1], 1))
        assert machine.in_step.wait(DEADLINE_S)
        thread.submit(greedy("b", [1], 1))
        thread.submit(greedy("c", [1], 1))
        with pytest.raises(Refused) as caught:
            thread.submit(greedy("d", [1], 1))
        assert caught.value.failure == Overloaded("the engine's inbox", 3, 1.0)
        machine.run_freely()
        recorder.wait_for_ends(3)
        thread.submit(greedy("d", [1], 1))
        recorder.wait_for_ends(4)
    assert "inside=0/3" in repr(thread)


def test_an_id_inside_is_refused() -> None:
    machine = counting(paced=True)
    with running(machine) as (thread, _):
        thread.submit(greedy("a", [1], 1))
        with pytest.raises(Refused):
            thread.submit(greedy("a", [1], 1))


def test_refused_admission_becomes_a_failed_event() -> None:
    """A refused request ends with `Failed`, and frees its place."""
    machine = counting()
    machine.refuse = InvalidRequest("prompt", "[]", "must hold a token")
    with running(machine, limit=1) as (thread, recorder):
        thread.submit(greedy("a", []))
        recorder.wait_for_ends(1)
        machine.refuse = None
        thread.submit(greedy("b", [1], 1))
        recorder.wait_for_ends(2)
    assert recorder.events[0] == Failed("a", InvalidRequest("prompt", "[]", "must hold a token"), Counts())


def test_cancel_while_a_step_runs() -> None:
    """A cancellation during a step takes effect before the next one. An unknown id is ignored."""
    machine = counting(paced=True)
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 1000))
        assert machine.in_step.wait(DEADLINE_S)
        thread.cancel("a")
        thread.cancel("stranger")
        machine.run_freely()
        recorder.wait_for_ends(1)
    assert [type(event) for event in recorder.events] == [Generated, Cancelled]


def test_cancel_before_it_began() -> None:
    machine = counting(paced=True)
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 1))
        assert machine.in_step.wait(DEADLINE_S)
        thread.submit(greedy("b", [1], 1))
        thread.cancel("b")
        machine.run_freely()
        recorder.wait_for_ends(2)
    assert recorder.events[-1] == Cancelled("b", Counts(prompt_tokens=1))


def test_late_cancel_does_not_cancel_a_reused_id() -> None:
    """A late cancellation ends with its request, and does not affect the next one of the same id."""
    machine = counting(paced=True)
    with running(machine) as (thread, recorder):
        on_events = recorder.on_events

        def resubmit(events: list[Event]) -> None:
            if not recorder.events:
                thread.submit(greedy("a", [1], 3))
            on_events(events)

        thread._on_events = resubmit
        thread.submit(greedy("a", [1], 1))
        assert machine.in_step.wait(DEADLINE_S)
        thread.cancel("a")
        machine.run_freely()
        recorder.wait_for_ends(2)
    assert [type(event) for event in recorder.events if not isinstance(event, Generated)] == [Finished, Finished]


def test_busy_spells_enclose_the_work() -> None:
    """Busy is reported before the first event of a spell, idle after its last."""
    with running(counting()) as (thread, recorder):
        for count, name in enumerate(("a", "b"), start=1):
            thread.submit(greedy(name, [1], 2))
            recorder.wait(lambda count=count: sum(item is False for item in recorder.log) == count)  # type: ignore[misc]
    kinds = [item if isinstance(item, bool) else type(item) for item in recorder.log]
    assert kinds == [True, Generated, Generated, Finished, False] * 2


def test_stop_fails_all_requests() -> None:
    """`stop` fails all requests, refuses new ones, ends the thread, and can be repeated."""
    machine = counting(paced=True)
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 1000))
        assert machine.in_step.wait(DEADLINE_S)
        thread.submit(greedy("b", [1], 1000))
        assert not thread.stop(0.0)  # it is in a step
        machine.run_freely()
        assert thread.stop(DEADLINE_S)
        with pytest.raises(Refused) as caught:
            thread.submit(greedy("c", [1], 1))
        assert caught.value.failure == Unavailable("this replica")
    ends = {event.request_id: event for event in recorder.events if isinstance(event, Failed)}
    assert set(ends) == {"a", "b"}
    assert recorder.log[-1] is False


def test_stop_before_start() -> None:
    recorder = EventRecorder()
    thread = EngineThread(counting(), on_events=recorder.on_events, on_busy=recorder.on_busy)
    assert thread.stop(0.0)


def test_raising_step_fails_only_running_requests() -> None:
    """A step that raises fails the requests inside, and the thread goes on."""
    machine = counting()
    machine.raises = [RuntimeError("a defect")]
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 1))
        recorder.wait_for_ends(1)
        thread.submit(greedy("b", [1], 1))
        recorder.wait_for_ends(2)
    assert recorder.events[0] == Failed("a", Internal(), Counts(prompt_tokens=1))
    assert isinstance(recorder.events[-1], Finished)


def test_steps_that_keep_raising_end_the_thread() -> None:
    """After two errors in a row the thread ends, and all later requests are refused."""
    machine = counting()
    machine.raises = [RuntimeError("a defect"), RuntimeError("a defect")]
    with running(machine) as (thread, recorder):
        thread.submit(greedy("a", [1], 1))
        recorder.wait(lambda: bool(recorder.log) and recorder.log[-1] is False)
        with pytest.raises(Refused) as caught:
            thread.submit(greedy("b", [1], 1))
    assert recorder.log == [True, Failed("a", Internal(), Counts()), False]
    assert caught.value.failure == Internal() == thread.poisoned


def test_probe_runs_alone_without_a_waiter() -> None:
    """After `probe_after_s` without a request the probe runs alone. A failed one poisons the thread."""
    machine = counting()
    machine.needs_probe, machine.probe_failure = True, ProbeFailed("v", "position 0")
    with running(machine) as (thread, _):
        assert machine.probed.wait(DEADLINE_S)
        machine.probed.clear()
        thread.cancel("nobody")
        assert thread.stop(DEADLINE_S)
        with pytest.raises(Refused) as caught:
            thread.submit(greedy("a", [1], 1))
    assert caught.value.failure == ProbeFailed("v", "position 0") == thread.poisoned


def test_probe_waits_for_a_request() -> None:
    """A request that arrives in time carries the probe."""
    machine = counting()
    machine.needs_probe = True
    with running(machine, probe_after_s=DEADLINE_S) as (thread, recorder):
        thread.submit(greedy("a", [1], 1))
        recorder.wait_for_ends(1)
    assert not machine.probed.is_set()
    assert not machine.needs_probe
