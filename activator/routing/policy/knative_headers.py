"""Which Revision a request on Knative's data path is for, and what its probes are answered. Who serves is others'.

Source: knative/serving, pkg/activator/handler/context_handler.go, probe_handler.go, healthz_handler.go; networking,
pkg/http/probe (98e5ef9).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

ACTIVATOR: Final = b"activator"  # what an autoscaler and a network's prober ask for, and read back
_PROBE: Final = b"k-network-probe"
_HASH: Final = b"k-network-hash"


class ProbeResponse(NamedTuple):
    """The answer to a probe."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()


def parse_revision(headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """Namespace and name, by the headers that a gateway adds, else by a host REVISION.NAMESPACE.svc.DOMAIN."""
    namespace, name = headers.get(b"knative-serving-namespace"), headers.get(b"knative-serving-revision")
    if namespace and name:
        return namespace.decode("latin-1"), name.decode("latin-1")
    labels = headers.get(b"host", b"").partition(b":")[0].decode("latin-1").lower().split(".", 3)
    return (labels[1], labels[0]) if len(labels) == 4 and labels[2] == "svc" else None


def answer_to_probe(headers: Mapping[bytes, bytes], *, is_ready: bool) -> ProbeResponse | None:
    """Of a kubelet, of an autoscaler, of a gateway's prober; None to what is no probe."""
    if headers.get(b"user-agent", b"").startswith(b"kube-probe/") or headers.get(b"k-kubelet-probe"):
        return ProbeResponse(200) if is_ready else ProbeResponse(500, b"not ready")
    asked = headers.get(_PROBE)
    if not asked:
        return None
    if asked == b"probe":
        seen = headers.get(_HASH)
        return (
            ProbeResponse(200, headers=((_HASH, seen),))
            if seen
            else ProbeResponse(400, b"a probe without K-Network-Hash")
        )
    return (
        ProbeResponse(200, ACTIVATOR)
        if asked == ACTIVATOR
        else ProbeResponse(400, b"K-Network-Probe must be activator or probe")
    )
