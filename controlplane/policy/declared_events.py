"""What of a declared object's status is worth an Event: that it is ready, has failed, or was refused. Pure.

Of what is as it was nothing is told again; how often the same is told, `scaling/knative/events` bounds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

READY, FAILED, REFUSED = "Ready", "Failed", "Refused"
_STATES: Final = {"ready": (READY, "it can be asked"), "faulty": (FAILED, "it is faulty")}  # of a ModelVersion


@dataclass(frozen=True, slots=True)
class Told:
    """An Event. `reason` is one of the three above."""

    reason: str
    message: str

    @property
    def is_warning(self) -> bool:
        """Whether somebody should look."""
        return self.reason != READY


def news(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Told, ...]:
    """Of an object whose status was that, empty for none, and is this now."""
    known = set(_told(before))
    return tuple(found for found in _told(after) if found not in known)


def _told(status: Mapping[str, Any]) -> Iterator[Told]:
    if (of := _STATES.get(str(status.get("state")))) is not None:
        yield Told(*of)
    conditions = status.get("conditions") or ()
    if any(each.get("reason") == "NotPushed" for each in conditions):  # it may be declared before; it is no refusal
        return
    for each in conditions:
        match each.get("type"), each.get("status"), each.get("reason"):
            case "Ready", "True", _:
                yield Told(READY, "it can be asked")
            case "Ready", "False", "Faulty":
                yield Told(FAILED, str(each.get("message")))
            case "Applied", "False", reason:
                yield Told(REFUSED, f"{reason}: {each.get('message')}")
