"""Read which Revision a request on Knative's data path is for, and answer Knative's probes.

Source: knative/serving, pkg/activator/handler/context_handler.go, probe_handler.go, healthz_handler.go; networking,
pkg/http/probe (98e5ef9). Serving the request is in `api/knative_data_path.py`.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

ACTIVATOR: Final = b"activator"  # the autoscaler's and the network prober's probe value, and our answer to it
_PROBE: Final = b"k-network-probe"
_HASH: Final = b"k-network-hash"


class ProbeResponse(NamedTuple):
    """The response to a probe."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()


def parse_revision(headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """Return namespace and name of the Revision, from the ingress's headers, else from a host
    REVISION.NAMESPACE.svc.DOMAIN. Return None if neither names one.
    """
    namespace, name = headers.get(b"knative-serving-namespace"), headers.get(b"knative-serving-revision")
    if namespace and name:
        return namespace.decode("latin-1"), name.decode("latin-1")
    labels = headers.get(b"host", b"").partition(b":")[0].decode("latin-1").lower().split(".", 3)
    return (labels[1], labels[0]) if len(labels) == 4 and labels[2] == "svc" else None


def respond_to_probe(headers: Mapping[bytes, bytes], *, is_ready: bool) -> ProbeResponse | None:
    """Return the response to a probe of the kubelet, the autoscaler or the network prober. None if it is no probe."""
    if headers.get(b"user-agent", b"").startswith(b"kube-probe/") or headers.get(b"k-kubelet-probe"):
        return ProbeResponse(200) if is_ready else ProbeResponse(500, b"not ready")
    probe = headers.get(_PROBE)
    if not probe:
        return None
    if probe == b"probe":
        network_hash = headers.get(_HASH)
        return (
            ProbeResponse(200, headers=((_HASH, network_hash),))
            if network_hash
            else ProbeResponse(400, b"a probe without K-Network-Hash")
        )
    return (
        ProbeResponse(200, ACTIVATOR)
        if probe == ACTIVATOR
        else ProbeResponse(400, b"K-Network-Probe must be activator or probe")
    )
