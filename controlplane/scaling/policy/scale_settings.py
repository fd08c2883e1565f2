"""Scale settings of a model, each with its bounds, default and description. See `kelvin/contracts/patches.py`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, structs

from controlplane.scaling.policy.scale_to_zero import LOCAL_WINDOW_MAX_S as WINDOW_MAX_S
from controlplane.scaling.policy.scale_to_zero import LOCAL_WINDOW_MIN_S as WINDOW_MIN_S
from controlplane.scaling.policy.scale_to_zero import check_local_window
from controlplane.scaling.policy.windows import AverageKind
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.patches import patch_of
from kelvin.contracts.wire import Wire

IdleSetting = Literal["zero", "sleep2", "sleep", "warm", "auto"]


class ScaleSettings(Wire, frozen=True):
    """How a model scales. If `target` is None, it follows from the version's streams. `window_s` is whole seconds."""

    # Stored as JSON: a narrower bound or a removed setting needs a migration.
    min: Annotated[int, Meta(ge=0, le=1000, description="Replicas that are always there.")] = 0
    max: Annotated[int, Meta(ge=1, le=1000, description="Replicas at most.")] = 1
    target: Annotated[float, Meta(gt=0, le=1_000_000, description="Requests at once per replica.")] | None = None
    window_s: Annotated[float, Meta(ge=WINDOW_MIN_S, le=WINDOW_MAX_S, description="Stable window in seconds.")] = 60.0
    grace_s: Annotated[float, Meta(ge=0, le=3600, description="Seconds between idle and zero.")] = 30.0
    idle: Annotated[IdleSetting, Meta(description="Where the last replica goes; auto: by break-even.")] = "zero"
    wait_price: Annotated[int, Meta(ge=0, le=10**9, description="Micro-units that a second of waiting costs.")] = 10_000
    average: Annotated[AverageKind, Meta(description="Weighted: the last seconds count for more.")] = "linear"
    backlog_s: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds of work by tokens before a replica; 0: requests alone count.")
    ] = 0.0


ScaleChange = patch_of(ScaleSettings, "ScaleChange", "Body of `PUT /admin/v1/models/M/scale`; what is not given stays.")


def apply_change(settings: ScaleSettings, change: Mapping[str, Any]) -> ScaleSettings:
    """Return the changed settings. Raises Refused(InvalidRequest) if min exceeds max or the window is invalid."""
    found = structs.replace(settings, **change)
    check_local_window(found.window_s)
    if found.min > found.max:
        raise Refused(InvalidRequest("min", str(found.min), f"must be {found.max} (max) or less"))
    return found
