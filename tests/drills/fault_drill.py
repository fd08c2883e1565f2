"""Drill an operation under a fault. The fault lasts until the operation has ended, or for some seconds."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.request_outcome import ANSWERED, EndKind, RequestOutcome
from tests.drills import leftovers
from tests.drills.bill_checks import outcome_problems
from tests.drills.drill_installation import running_drill_installation
from tests.drills.drill_models import TinyModels
from tests.drills.fault_scenes import SCENES, FaultScene
from tests.drills.matrix import FaultKind, Operation, fault_expected
from tests.drills.operations import Operation as Running
from tests.drills.operations import PushCommand
from tests.drills.stage_drill import DrillContext, check_group, run_cell

FAULT_DURATION_S: Final = 9.0  # longer than any process of Kelvin waits for a lock


def run_under_fault(
    scene: FaultScene, models: TinyModels, operation: Operation, expected: RequestOutcome
) -> tuple[RequestOutcome, list[str]]:
    """Return the client's outcome and all problems. After the fault, the same operation must succeed."""
    installation = scene.installation
    push = partial(installation.push, models.fresh(), "pushed")
    installation.wait_until_whole()
    if operation is Operation.COLD:
        installation.scale_to_zero()
        installation.wait_until_whole()
    else:
        installation.replica_at_work()
    with contextlib.ExitStack() as stack:
        with scene.during():
            running: Running = push() if operation is Operation.PUSH else scene.call(scene.tokens)
            stack.callback(running.close)
            poll_until_true(running.is_over, FAULT_DURATION_S)
        seen = running.outcome()
        wrong = outcome_problems(expected, seen)
        endings = [replace(ending, unread=scene.unread) for ending in running.endings()]
    if isinstance(running, PushCommand) and seen != ANSWERED:
        wrong += [] if (repeated := push().outcome()) == ANSWERED else [f"the same again is {repeated}"]
    installation.wait_until_whole()
    installation.expect_answer()
    return seen, wrong + installation.settle_bill(endings)


def drill_fault(context: DrillContext, fault: FaultKind, operations: Sequence[Operation]) -> None:
    """Drill each operation under the fault, on one installation, then run the closing checks."""
    shared = leftovers.shared_memory()
    with (
        SCENES[fault](context.work / str(fault)) as scene,
        running_drill_installation(scene.installation, context.models.served) as installation,
    ):
        for operation in operations:
            expected = fault_expected(fault, operation)
            if expected.way is not EndKind.NOT_CONCERNED:
                cell = partial(run_under_fault, scene, context.models, operation, expected)
                context.tell(run_cell(f"{fault}/{operation}", cell))
        scene.sound()
        context.tell(run_cell(f"after {fault}", partial(check_group, installation, shared)))
