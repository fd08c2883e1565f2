"""One cell of the second matrix: an operation begun under a fault, which lasts until it has ended, or some seconds."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from coldstart_bench.endings import ANSWERED, Outcome, Way
from coldstart_bench.patience import comes
from tests.drills import leftovers
from tests.drills.bill import reasons
from tests.drills.drill import Yard, closing_checks, timed
from tests.drills.ground import standing
from tests.drills.matrix import Fault, Operation, fault_expected
from tests.drills.models import TinyModels
from tests.drills.operations import Operation as Running
from tests.drills.operations import Push
from tests.drills.scenes import SCENES, Scene

LASTS_S: Final = 9.0  # longer than anything of ours waits for a lock


def endure(scene: Scene, models: TinyModels, operation: Operation, expected: Outcome) -> tuple[Outcome, list[str]]:
    """What the client saw, and what is wrong. Whatever it was, the same is answered once the fault is over."""
    ground = scene.ground
    push = partial(ground.push, models.fresh(), "pushed")
    ground.wait_until_whole()
    if operation is Operation.COLD:
        ground.to_zero()
        ground.wait_until_whole()
    else:
        ground.replica_at_work()
    with contextlib.ExitStack() as stack:
        with scene.during():
            running: Running = push() if operation is Operation.PUSH else scene.call(scene.tokens)
            stack.callback(running.close)
            comes(running.is_over, LASTS_S)
        seen = running.outcome()
        wrong = reasons(expected, seen)
        endings = [replace(ending, unread=scene.unread) for ending in running.endings()]
    if isinstance(running, Push) and seen != ANSWERED:
        wrong += [] if (repeated := push().outcome()) == ANSWERED else [f"the same again is {repeated}"]
    ground.wait_until_whole()
    ground.expect_answer()
    return seen, wrong + ground.settle(endings)


def drill_fault(yard: Yard, fault: Fault, operations: Sequence[Operation]) -> None:
    """Each operation under the fault, on one installation; then its closing checks."""
    shared = leftovers.shared_memory()
    with SCENES[fault](yard.work / str(fault)) as scene, standing(scene.ground, yard.models.served) as ground:
        for operation in operations:
            expected = fault_expected(fault, operation)
            if expected.way is not Way.NOT_CONCERNED:
                cell = partial(endure, scene, yard.models, operation, expected)
                yard.tell(timed(f"{fault}/{operation}", cell))
        scene.sound()
        yard.tell(timed(f"after {fault}", partial(closing_checks, ground, shared)))
