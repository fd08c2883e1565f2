"""Owners of fields: server-side apply, and the effect of other writes (structured-merge-diff's merge/update.go).

Owners are in `metadata.managedFields`, as on a real server. Fields without an owner (names, times, versions) are left
out. A write to a subresource owns nothing outside of it. A write to the object owns no status if the status is a
subresource.
"""

import copy
from dataclasses import dataclass
from typing import Any, Final

from tests.cluster.kube_api.field_sets import (
    EMPTY,
    Fields,
    Path,
    Schema,
    UndeclaredField,
    check,
    difference,
    fields,
    from_v1,
    in_order,
    merge,
    shown,
    to_v1,
    with_parents,
    without,
)
from tests.cluster.kube_api.status_answers import Json, Refused, failure

NOBODYS: Final = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "name", "namespace", "creationTimestamp", "selfLink", "uid", "clusterName", "generation",
                "managedFields", "resourceVersion",
            )
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Manager:
    """A field manager: its name and kind of write."""

    operation: str  # "Apply" | "Update"
    name: str
    api_version: str
    subresource: str = ""

    @property
    def described(self) -> str:
        text = f'"{self.name}"'
        if self.subresource:
            text += f' with subresource "{self.subresource}"'
        return f"{text} using {self.api_version}" if self.operation == "Update" else text


Managers = dict[Manager, Fields]
Times = dict[Manager, str]


def read(obj: Json) -> tuple[Managers, Times]:
    managers, times = {}, {}
    for each in obj.get("metadata", {}).get("managedFields", []):
        who = Manager(each["operation"], each["manager"], each["apiVersion"], each.get("subresource", ""))
        managers[who] = from_v1(each.get("fieldsV1", {}))
        times[who] = each["time"]
    return managers, times


def written(managers: Managers, times: Times) -> list[Json]:
    found = []
    for who in sorted(managers, key=lambda each: (each.operation, times[each], each.name, each.subresource)):
        if not managers[who]:
            continue
        entry: Json = {
            "manager": who.name,
            "operation": who.operation,
            "apiVersion": who.api_version,
            "time": times[who],
            "fieldsType": "FieldsV1",
            "fieldsV1": to_v1(managers[who]),
        }
        found.append(entry | ({"subresource": who.subresource} if who.subresource else {}))
    return found


def bare(obj: Json) -> Json:
    """Return the object without its managed fields."""
    metadata = {key: value for key, value in obj.get("metadata", {}).items() if key != "managedFields"}
    return obj | {"metadata": metadata}


def _owned(found: Fields, subresource: str, has_status: bool) -> Fields:
    """Return the fields that such a write can own."""

    def may(path: Path) -> bool:
        if path in NOBODYS:
            return False
        if subresource == "status":
            return path[0] == "f:status"
        return not (has_status and path[0] == "f:status")

    return frozenset(path for path in found if may(path))


def conflicting(conflicts: Managers) -> Refused:
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {who.described}", "field": shown(path)}
        for who in sorted(conflicts, key=lambda each: each.name)
        for path in in_order(conflicts[who])
    ]
    if len(causes) == 1:
        text = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        text = f"{len(causes)} conflicts: " + "\n".join(
            "\n- ".join([f"conflicts with {who.described}:", *map(shown, in_order(conflicts[who]))])
            for who in sorted(conflicts, key=lambda each: each.name)
        )
    return Refused(409, failure(409, f"Apply failed with {text}", details={"causes": causes}))


def applied(schema: Schema, live: Json, config: Json, who: Manager, *, force: bool, now: str, has_status: bool) -> Json:
    """Return the object after an apply, with its `managedFields`.

    Raises UndeclaredField for fields that the schema lacks, Refused (409) for changed fields of other managers.
    """
    if faults := check(schema, config):
        raise UndeclaredField(faults)
    managers, times = read(live)
    base = bare(live)
    last = managers.get(who, EMPTY)
    managers[who] = fields(schema, config)
    new = merge(schema, base, config)
    if last:
        new = _pruned(schema, new, managers, last)
    delta = difference(schema, base, new)
    changed = delta.added | delta.modified
    conflicts = {each: both for each, had in managers.items() if each != who and (both := had & changed)}
    if conflicts and not force:
        raise conflicting(conflicts)
    for each in managers:
        if each != who:
            managers[each] = managers[each] - conflicts.get(each, EMPTY) - delta.removed
    managers[who] = _owned(managers[who], who.subresource, has_status)
    if not delta.none or who not in times:
        times[who] = now
    return _with(base if delta.none else new, managers, times)


def _pruned(schema: Schema, merged: Json, managers: Managers, last: Fields) -> Json:
    """Remove fields of this manager's last apply that have no owner now (prune, addBackOwnedItems,
    addBackDanglingItems).
    """
    last = with_parents(schema, last)
    pruned = without(schema, merged, last)
    pruned = {} if not isinstance(pruned, dict) else pruned
    everything = with_parents(schema, fields(schema, merged))
    owned = with_parents(schema, frozenset().union(*managers.values()))
    left = with_parents(schema, fields(schema, pruned))
    pruned = without(schema, merged, everything - (left | owned))
    pruned = {} if not isinstance(pruned, dict) else pruned
    left = with_parents(schema, fields(schema, pruned))
    result: Any = without(schema, merged, (everything - left) & last)
    return _without_nulls(result or {})


def _without_nulls(value: Json) -> Json:
    return {
        name: _without_nulls(each) if isinstance(each, dict) else each
        for name, each in value.items()
        if each is not None
    }


def updated(schema: Schema, live: Json, new: Json, who: Manager, *, now: str, has_status: bool) -> Json:
    """Return the object after a write other than apply, with its `managedFields`. The writer takes the fields that it
    changed. Managed fields in the object itself are accepted (fieldmanager.go, Update), as kubectl sends them when it
    migrates to apply.
    """
    managers, times = read(new) if new.get("metadata", {}).get("managedFields") else read(live)
    new = bare(new)
    delta = difference(schema, bare(live), new)
    changed = delta.added | delta.modified
    for each in managers:
        if each != who:
            managers[each] -= changed | delta.removed
    before = managers.get(who, EMPTY)
    managers[who] = _owned((before - delta.removed) | changed, who.subresource, has_status)
    if managers[who] != before or who not in times:
        times[who] = now
    return _with(new, managers, times)


def _with(obj: Json, managers: Managers, times: Times) -> Json:
    found = copy.deepcopy(obj)
    entries = written(managers, times)
    if entries:
        found.setdefault("metadata", {})["managedFields"] = entries
    return found
