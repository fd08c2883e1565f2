"""The garbage collector of kube-controller-manager. Namespaces are not deleted here.

A dependent goes with the last of its owners, or before an owner that is deleted in the foreground. During a foreground
deletion a dependent with its own dependents is deleted in the foreground, too, as by the real collector.
"""

from tests.cluster.kube_api.deletions import Deletion, delete, finish
from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.object_storage import ObjectStorage
from tests.cluster.kube_api.status_answers import Json

ROUNDS = 50


def collect(cluster: ObjectStorage) -> None:
    """Collect until nothing changes any more."""
    with cluster.lock:
        for _ in range(ROUNDS):
            if not _round(cluster):
                return
        raise AssertionError("the garbage collector goes round in circles")


def _round(cluster: ObjectStorage) -> bool:
    kinds = {each.stored: each for each in cluster.kinds.all()}
    objects = [(kinds[stored], obj) for stored, obj in cluster.store.all_objects() if stored in kinds]
    owners = {obj["metadata"]["uid"]: obj for _, obj in objects}
    before = cluster.store.version
    dependents: dict[str, list[tuple[Kind, Json]]] = {}
    for kind, obj in objects:
        for reference in obj["metadata"].get("ownerReferences", []):
            dependents.setdefault(reference["uid"], []).append((kind, obj))
    for kind, obj in objects:
        metadata = obj["metadata"]
        finalizers = metadata.get("finalizers", [])
        if metadata.get("deletionTimestamp") and "foregroundDeletion" in finalizers:
            _foreground(cluster, kind, obj, dependents)
        references = metadata.get("ownerReferences", [])
        alone = references and not any(each["uid"] in owners for each in references)
        if alone and not metadata.get("deletionTimestamp"):
            _delete(cluster, kind, obj, "Background")
    return cluster.store.version != before


def _foreground(cluster: ObjectStorage, kind: Kind, obj: Json, dependents: dict[str, list[tuple[Kind, Json]]]) -> None:
    uid = obj["metadata"]["uid"]
    blocking = [
        (held, each)
        for held, each in dependents.get(uid, [])
        if any(it["uid"] == uid and it.get("blockOwnerDeletion") for it in each["metadata"]["ownerReferences"])
    ]
    if not blocking:
        _unfinalize(cluster, kind, obj, "foregroundDeletion")
    for held, each in blocking:
        if not each["metadata"].get("deletionTimestamp"):
            _delete(cluster, held, each, "Foreground" if each["metadata"]["uid"] in dependents else "Background")


def _delete(cluster: ObjectStorage, kind: Kind, obj: Json, policy: str) -> None:
    metadata = obj["metadata"]
    if cluster.store.get(kind, metadata.get("namespace", ""), metadata["name"]) is not None:
        delete(cluster, kind, metadata.get("namespace", ""), metadata["name"], Deletion(policy))


def _unfinalize(cluster: ObjectStorage, kind: Kind, obj: Json, name: str) -> None:
    metadata = obj["metadata"]
    now = cluster.store.get(kind, metadata.get("namespace", ""), metadata["name"])
    if now is None:
        return
    left = [each for each in now["metadata"].get("finalizers", []) if each != name]
    if left:
        cluster.store.upsert(kind, now | {"metadata": now["metadata"] | {"finalizers": left}})
    else:
        finish(cluster, kind, now)
