"""Degradation steps of a model: what it gives up before it refuses requests, as set by its admin. Pure.

A step applies once the expected wait reaches `wait_s`. With None it applies only if the request would be refused.
"""

from typing import Annotated, Final

from msgspec import Meta, field

from kelvin.contracts.wire import Wire

DEGRADE_HEADER: Final = "x-kelvin-degrade"  # request header: `never`
DEGRADED_HEADER: Final = "x-kelvin-degraded"  # response header: the step
RECORDED_STEP_HEADER: Final = "x-kelvin-gave-up"  # to a replica: `degraded` for the usage record, also an orphan's
MAX_STEPS: Final = 8  # per model and plan
MAX_PLANS: Final = 16  # plans of one model that have their own steps
OTHER_STEP: Final = "other"  # an unknown step
MAX_WAIT_S: Final = 600
MAX_CACHED_AGE_S: Final = 86_400

WaitS = Annotated[float, Meta(gt=0, le=MAX_WAIT_S)]


class CapOutput(Wire, frozen=True, tag_field="step", tag="cap-output"):
    """Limit the response to `tokens`."""

    tokens: Annotated[int, Meta(ge=1)]
    wait_s: WaitS | None = None


class Fallback(Wire, frozen=True, tag_field="step", tag="fallback"):
    """Use another model's response: a model of the owner, or `OWNER/M` that the owner may call."""

    model: str
    wait_s: WaitS | None = None


class Cached(Wire, frozen=True, tag_field="step", tag="cached"):
    """Use the response that the tenant's same request got at most `age_s` seconds ago."""

    age_s: Annotated[int, Meta(ge=1, le=MAX_CACHED_AGE_S)]
    wait_s: WaitS | None = None


DegradationStep = CapOutput | Fallback | Cached


DegradationSteps = Annotated[tuple[DegradationStep, ...], Meta(max_length=MAX_STEPS)]  # ordered by `wait_s`
PlanName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)")]  # as a DNS label


_STEPS: Final = {"cap-output": "cap-output", "fallback-of": "fallback", "cached": "cached"}


def step_of_record(recorded: str) -> str:
    """Return the step in a record's `degraded`, as metrics and bills name it. `OTHER_STEP` if it is unknown."""
    word, has_value, _ = recorded.partition("=")
    return _STEPS.get(word, OTHER_STEP) if has_value else OTHER_STEP


class Ladder(Wire, frozen=True):
    """Body and response of `PUT /admin/v1/models/M/ladder`. Tenants of a plan in `plans` get only its steps."""

    steps: DegradationSteps
    plans: Annotated[dict[PlanName, DegradationSteps], Meta(max_length=MAX_PLANS)] = field(default_factory=dict)
