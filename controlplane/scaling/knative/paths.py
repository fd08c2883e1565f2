"""Where an API server keeps a kind of object. Pure."""

from urllib.parse import quote

from controlplane.scaling.knative.cluster import Ref


def collection(api_version: str, kind: str, namespace: str | None) -> str:
    """Of all of a kind, of a namespace where one is given."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    where = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    return f"{root}{where}/{plural(kind)}"


def plural(kind: str) -> str:
    """Return the plural of a kind, as paths have it. Right for the kinds that are used here."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def path(ref: Ref) -> str:
    """Of one object."""
    return f"{collection(ref.api_version, ref.kind, ref.namespace)}/{quote(ref.name, safe='')}"
