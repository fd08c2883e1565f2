"""What is to be done to one object of a cluster so that it is as we want it. Pure; doing it is `converge`'s work.

Only what we name is compared: a webhook fills in the rest, and spells quantities its own way. What it keeps otherwise
although we have just written it is not written again, but shown. Times are in seconds of any clock that does not step.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Final

from contracts.doubling import Doubling
from controlplane.policy.labels import APPLIED, INSTALLATION, MANAGED_BY, MANAGER

Json = Mapping[str, Any]

FIRST_S: Final = 1.0
LONGEST_S: Final = 300.0
PAUSES: Final = Doubling(FIRST_S, LONGEST_S)
CALM_S: Final = 120.0  # an object that stayed as it was for so long is repaired at once again
SHOWN: Final = 8  # differences of one object
FOREIGN: Final = "Foreign"  # the reason of what another installation wrote

_QUANTITIES: Final = frozenset({"limits", "requests", "sizeLimit", "hard", "min", "max", "default", "defaultRequest"})
_QUANTITY: Final = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,3}))?")
_SCALE: Final = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of ours that is otherwise. Values are cut to what a line holds."""

    field: str
    wanted: str
    seen: str

    def __str__(self) -> str:
        return f"{self.field} is {self.seen}, not {self.wanted}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object is not as it should be, for somebody to read."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What was tried for one object. Forgotten as soon as something else is wanted of it."""

    stamp: str = ""  # of what was tried; empty: of its deletion
    tries: int = 0  # refusals, or repairs soon after one another
    not_before: float = 0.0
    tried_at: float = 0.0
    kept: tuple[Difference, ...] = ()  # what the cluster makes of it whenever we write it
    refusal: Refusal | None = None

    @property
    def failing(self) -> bool:
        """Whether it was not taken when it was last tried."""
        return self.refusal is not None and not self.kept


@dataclass(frozen=True, slots=True)
class Apply:
    """Write all of it."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete that very object."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Too early to try again."""

    until: float


@dataclass(frozen=True, slots=True)
class Settled:
    """There is nothing to do until something changes."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another installation's, to be left as it is."""

    owner: str


Step = Apply | Delete | Wait | Settled | Foreign


def judge(wanted: Json | None, seen: Json | None, memory: Memory, now: float, installation: str) -> Step:
    """The next step. `wanted` is stamped; None for both of them is nothing to do.

    What is being deleted is left alone until it is gone. What does not bear our label, or was not written here, is
    never deleted: somebody may have applied what `kelvin models render` prints. What the control plane of another
    installation wrote is neither deleted nor written over.
    """
    if seen is not None and "deletionTimestamp" in seen["metadata"]:
        return Settled()
    if wanted is None:
        if seen is None or not ours(seen, installation):
            return Settled()
        step: Step = Delete(seen["metadata"]["uid"])
    elif seen is None:
        step = Apply()
    elif (owner := owner_of(seen)) not in (None, installation):
        return Foreign(str(owner))
    else:
        found = differences(wanted, seen)
        if not found or (memory.kept == found and memory.stamp == stamp_of(wanted)):
            return Settled()
        step = Apply()
    if memory.stamp == stamp_of(wanted) and memory.not_before > now:
        return Wait(memory.not_before)
    return step


def succeeded(wanted: Json | None, answer: Json | None, memory: Memory, now: float, luck: float) -> Memory:
    """After a step that the cluster took. `answer` is the object as it says it is, `luck` in [0, 1)."""
    again = memory.stamp == stamp_of(wanted) and memory.tries > 0 and now - memory.tried_at < CALM_S
    again = again and not memory.failing
    tries = memory.tries + 1 if again else 1
    kept = () if wanted is None or answer is None else differences(wanted, answer)
    return Memory(
        stamp=stamp_of(wanted),
        tries=tries,
        not_before=now + (pause_s(tries - 1, luck) if again else 0.0),
        tried_at=now,
        kept=kept,
        refusal=Refusal("Differs", "; ".join(str(each) for each in kept)) if kept else None,
    )


def refused(wanted: Json | None, refusal: Refusal, memory: Memory, now: float, luck: float) -> Memory:
    """Return the memory after a step that the cluster refused."""
    tries = memory.tries + 1 if memory.failing and memory.stamp == stamp_of(wanted) else 1
    return Memory(stamp_of(wanted), tries, now + pause_s(tries, luck), now, refusal=refusal)


def not_sooner(memory: Memory, until: float) -> Memory:
    """Return the memory with no attempt before `until`, because the cluster asked for that."""
    return replace(memory, not_before=max(memory.not_before, until))


def pause_s(tries: int, luck: float) -> float:
    """Return the pause before the next attempt. It doubles, within bounds, and is shortened by up to half by `luck` in
    [0, 1).
    """
    return PAUSES.after(tries, luck)


def ours(obj: Json, installation: str) -> bool:
    """Whether it bears our label, and was written by a control plane of this installation, as far as is known."""
    labels, notes = obj["metadata"].get("labels") or {}, obj["metadata"].get("annotations") or {}
    return labels.get(MANAGED_BY) == MANAGER and APPLIED in notes and owner_of(obj) in (None, installation)


def owner_of(obj: Json) -> str | None:
    """The installation whose control plane wrote it; None where nobody said that."""
    noted = (obj["metadata"].get("annotations") or {}).get(INSTALLATION)
    return None if noted is None else str(noted)


def stamped(obj: Json, installation: str) -> dict[str, Any]:
    """A copy that says whose it is and what it was rendered as, so that a later rendering without some field differs
    from it. What has a stamp already (`owned_part`) keeps it.
    """
    if APPLIED in (obj["metadata"].get("annotations") or {}):
        return dict(obj)
    about = {key: value for key, value in obj["metadata"].items() if key != "annotations"}
    noted = {key: value for key, value in (obj["metadata"].get("annotations") or {}).items() if key != APPLIED}
    noted[INSTALLATION] = installation
    whole = {**obj, "metadata": {**about, "annotations": noted}}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    return {**obj, "metadata": {**about, "annotations": {**noted, APPLIED: digest}}}


def stamp_of(wanted: Json | None) -> str:
    """Of a stamped object; empty for one that is not wanted."""
    return "" if wanted is None else str(wanted["metadata"]["annotations"][APPLIED])


def differences(wanted: Json, seen: Json) -> tuple[Difference, ...]:
    """Fields of ours that are otherwise, or that somebody else has taken; the first few."""
    if wanted == seen:
        return ()
    found = tuple(islice(chain(_compared(wanted, seen, "", False), _taken(wanted, seen)), SHOWN))
    if wanted.get("kind") == "Secret":  # said in statuses and logs
        return tuple(Difference(each.field, "the one wanted", "another") for each in found)
    return found


def _compared(wanted: Any, seen: Any, path: str, quantities: bool) -> Iterator[Difference]:
    if wanted is None or wanted == seen:  # most of it, most of the time
        return
    if wanted in ({}, []) and seen in (None, {}, []):  # what is empty may be left out
        return
    if isinstance(wanted, Mapping) and isinstance(seen, Mapping):
        for key, value in wanted.items():
            if path or key != "status":  # another call writes that
                inner = f"{path}.{key}" if path else str(key)
                yield from _compared(value, seen.get(key), inner, quantities or key in _QUANTITIES)
    elif isinstance(wanted, list) and isinstance(seen, list) and len(wanted) == len(seen):
        for index, (one, other) in enumerate(zip(wanted, seen, strict=True)):
            yield from _compared(one, other, f"{path}[{index}]", quantities)
    elif isinstance(wanted, list) and isinstance(seen, list):
        yield Difference(path, f"of {len(wanted)}", f"a list of {len(seen)}")
    elif not (quantities and quantity(wanted) == quantity(seen) is not None):
        yield Difference(path, _shown(wanted), _shown(seen))


def quantity(value: Any) -> Decimal | None:
    """A number as Kubernetes writes amounts: `8192Mi` is `8Gi`, 1 is `1000m`. None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    digits, suffix, exponent = match.groups()
    return Decimal(digits) * (_SCALE[suffix] if suffix else Decimal(10) ** int(exponent or 0))


def _taken(wanted: Json, seen: Json) -> Iterator[Difference]:
    """Fields that another manager took, whatever it wrote there: in a list that is written whole, more than we named.

    https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
    """
    if not seen["metadata"].get("managedFields"):
        return
    mine = _managed(seen)
    head = ("apiVersion", "kind", "status")
    about = {key: value for key, value in wanted["metadata"].items() if key not in ("name", "namespace")}
    rest = {key: value for key, value in wanted.items() if key not in head}
    yield from _missing({**rest, "metadata": about}, mine, "")


def _managed(seen: Json) -> Json:
    """The fields of an object that our applies own."""
    for entry in seen["metadata"].get("managedFields") or ():
        if (entry.get("manager"), entry.get("operation"), entry.get("subresource", "")) == (MANAGER, "Apply", ""):
            fields: Json = entry.get("fieldsV1") or {}
            return fields
    return {}


def owned_part(seen: Json) -> dict[str, Any]:
    """Return what our last apply said of an object, its stamp included. To apply that again changes nothing."""
    head = {"apiVersion": seen["apiVersion"], "kind": seen["kind"]}
    part = _owned({key: value for key, value in seen.items() if key not in (*head, "status")}, _managed(seen))
    about = {key: seen["metadata"][key] for key in ("name", "namespace") if key in seen["metadata"]}
    return {**head, **part, "metadata": {**part.get("metadata", {}), **about}}


def _owned(obj: Json, fields: Json) -> dict[str, Any]:
    """Lists are taken whole."""
    found: dict[str, Any] = {}
    for key, value in obj.items():
        mine = fields.get(f"f:{key}")
        if mine is not None:
            found[key] = _owned(value, mine) if mine and isinstance(value, Mapping) else value
    return found


def _missing(wanted: Json, fields: Json, path: str) -> Iterator[Difference]:
    for key, value in wanted.items():
        if value is None or value in ({}, []):
            continue
        inner = f"{path}.{key}" if path else key
        mine = fields.get(f"f:{key}")
        if mine is None:
            yield Difference(inner, "ours", "another manager's")
        elif mine and isinstance(value, Mapping):  # {} is one that is written whole
            yield from _missing(value, mine, inner)


def _shown(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str) if value is not None else "missing"
    return text if len(text) <= 80 else f"{text[:79]}…"
