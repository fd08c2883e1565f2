"""The queue keeps order and counts what it holds."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from activator.policy.queue import Fifo, Load


class FifoMachine(RuleBasedStateMachine):
    """Two queues beside a plain list each; they share one load."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Load()
        self.queues = [Fifo[int](self.shared), Fifo[int](self.shared)]
        self.models: list[deque[tuple[int, int]]] = [deque(), deque()]
        self.next = 0

    @rule(which=st.integers(0, 1), nbytes=st.integers(0, 100))
    def put(self, which: int, nbytes: int) -> None:
        self.queues[which].put(self.next, nbytes)
        self.models[which].append((self.next, nbytes))
        self.next += 1

    @precondition(lambda self: any(self.models))
    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if self.models[which]:
            assert self.queues[which].take() == self.models[which].popleft()[0]

    @rule(which=st.integers(0, 1), entry=st.integers(0, 30))
    def discard(self, which: int, entry: int) -> None:
        kept = deque(pair for pair in self.models[which] if pair[0] != entry)
        assert self.queues[which].discard(entry) == (len(kept) < len(self.models[which]))
        self.models[which] = kept

    @invariant()
    def loads_add_up(self) -> None:
        for queue, model in zip(self.queues, self.models, strict=True):
            queue.check_integrity()
            assert (queue.own.entries, queue.own.nbytes) == (len(model), sum(nbytes for _, nbytes in model))
        assert self.shared.entries == sum(map(len, self.models))


TestFifo = FifoMachine.TestCase
TestFifo.settings = settings(max_examples=50, stateful_step_count=40)
