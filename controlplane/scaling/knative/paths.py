"""Where an API server keeps a kind of object. Pure."""

from urllib.parse import quote

from controlplane.scaling.knative.cluster import Ref


def collection(api_version: str, kind: str, namespace: str | None) -> str:
    """Of all of a kind, of a namespace where one is given. Every kind that we name has the plainest of plurals."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    where = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    return f"{root}{where}/{kind.lower()}s"


def path(ref: Ref) -> str:
    """Of one object."""
    return f"{collection(ref.api_version, ref.kind, ref.namespace)}/{quote(ref.name, safe='')}"
