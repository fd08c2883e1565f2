"""What a model gives up before it refuses: its ladder, step by step, as its admin has set it. Pure.

A step is taken once the expected wait is `wait_s`, or (None) only where the request would be refused.
"""

from typing import Annotated, Final

from msgspec import Meta, field

from kelvin.contracts.wire import Wire

DEGRADE_HEADER: Final = "x-kelvin-degrade"  # of a request: `never`
DEGRADED_HEADER: Final = "x-kelvin-degraded"  # of an answer: the step
RECORDED_STEP_HEADER: Final = (
    "x-kelvin-gave-up"  # of a request to a replica: what a record of it says, an orphan's, too
)
MAX_STEPS: Final = 8  # steps of one ladder
MAX_PLANS: Final = 16  # with steps of their own
OTHER_STEP: Final = "other"  # a step that nothing here takes
MAX_WAIT_S: Final = 600
MAX_CACHED_AGE_S: Final = 86_400

WaitS = Annotated[float, Meta(gt=0, le=MAX_WAIT_S)]


class CapOutput(Wire, frozen=True, tag_field="step", tag="cap-output"):
    """An answer of so many tokens at most."""

    tokens: Annotated[int, Meta(ge=1)]
    wait_s: WaitS | None = None


class Fallback(Wire, frozen=True, tag_field="step", tag="fallback"):
    """Another model's answer: one of the owner's, or `OWNER/M` that it may call."""

    model: str
    wait_s: WaitS | None = None


class Cached(Wire, frozen=True, tag_field="step", tag="cached"):
    """What the same request of the same tenant was answered, at most so many seconds ago."""

    age_s: Annotated[int, Meta(ge=1, le=MAX_CACHED_AGE_S)]
    wait_s: WaitS | None = None


DegradationStep = CapOutput | Fallback | Cached


DegradationSteps = Annotated[tuple[DegradationStep, ...], Meta(max_length=MAX_STEPS)]  # in the order of their waits
PlanName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)")]  # as a DNS label


_STEPS: Final = {"cap-output": "cap-output", "fallback-of": "fallback", "cached": "cached"}


def step_of_record(recorded: str) -> str:
    """The step of a record's `degraded`, as metrics and bills name it; `OTHER_STEP` for what is none."""
    word, has_value, _ = recorded.partition("=")
    return _STEPS.get(word, OTHER_STEP) if has_value else OTHER_STEP


class Ladder(Wire, frozen=True):
    """Body of `PUT /admin/v1/models/M/ladder`, and its answer. A plan of `plans` has those steps, and no others."""

    steps: DegradationSteps
    plans: Annotated[dict[PlanName, DegradationSteps], Meta(max_length=MAX_PLANS)] = field(default_factory=dict)
