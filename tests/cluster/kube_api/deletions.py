"""Deletion of objects: preconditions, finalizers and propagation policy. Pods have no grace period here."""

import copy
from dataclasses import dataclass
from typing import Final

from tests.cluster.kube_api import status_answers
from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.object_storage import Answer, ObjectStorage
from tests.cluster.kube_api.objects import now, tidy
from tests.cluster.kube_api.status_answers import Json

HOLDING: Final = {"Foreground": "foregroundDeletion"}


@dataclass(frozen=True, slots=True)
class Deletion:
    """The options of a DELETE."""

    policy: str = ""
    uid: str = ""
    version: str = ""


PLAIN: Final = Deletion()


def delete(cluster: ObjectStorage, kind: Kind, namespace: str, name: str, how: Deletion = PLAIN) -> Answer:
    """Delete an object, or mark it while finalizers hold it. Raises Refused: 404, or 409 for a precondition."""
    with cluster.lock:
        old = cluster.stored(kind, namespace, name)
        _check(kind, old, how)
        metadata = dict(old["metadata"])
        finalizers = metadata.get("finalizers", [])
        if how.policy:
            finalizers = [each for each in finalizers if each not in HOLDING.values()]
            finalizers += [HOLDING[how.policy]] if how.policy in HOLDING else []
        if not finalizers:
            cluster.remove(kind, old)
            return Answer(200, copy.deepcopy(old) if kind.returned else _success(kind, old))
        if not metadata.get("deletionTimestamp"):
            metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 0}
            if metadata.get("generation"):
                metadata["generation"] += 1
        new = old | {"metadata": tidy(metadata | {"finalizers": finalizers})}
        if new != old:
            new = cluster.store.upsert(kind, new)
        return Answer(200, copy.deepcopy(new))


def finish(cluster: ObjectStorage, kind: Kind, obj: Json) -> None:
    """Remove an object whose last finalizer is gone."""
    with cluster.lock:
        metadata = obj["metadata"]
        found = cluster.store.get(kind, metadata.get("namespace", ""), metadata["name"])
        if found is not None:
            cluster.remove(kind, found)


def _check(kind: Kind, old: Json, how: Deletion) -> None:
    about, metadata = kind.named(old["metadata"]["name"]), old["metadata"]
    if how.uid and how.uid != metadata["uid"]:
        what = f"the UID in the precondition ({how.uid}) does not match the UID in record ({metadata['uid']})"
        raise status_answers.precondition(about, what, "The object might have been deleted and then recreated")
    if how.version and how.version != metadata["resourceVersion"]:
        is_, was = metadata["resourceVersion"], how.version
        what = f"the ResourceVersion in the precondition ({was}) does not match the ResourceVersion in record ({is_})"
        raise status_answers.precondition(about, what, "The object might have been modified")


def _success(kind: Kind, obj: Json) -> Json:
    details = kind.named(obj["metadata"]["name"]).detailed(kind.plural, uid=obj["metadata"]["uid"])
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
