"""What a request on Knative's data path is for, and what a probe is told."""

import pytest

from activator.routing.policy.knative_headers import answer_to_probe, parse_revision

NAMED = {b"knative-serving-namespace": b"ns", b"knative-serving-revision": b"m-1"}


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        pytest.param(NAMED, ("ns", "m-1"), id="a gateway says so"),
        pytest.param({**NAMED, b"host": b"x-2.other.svc.cluster.local"}, ("ns", "m-1"), id="and that counts"),
        pytest.param({b"host": b"m-1.ns.svc.cluster.local:80"}, ("ns", "m-1"), id="the host does"),
        pytest.param({b"host": b"M-1.NS.svc.a.b"}, ("ns", "m-1"), id="in any case, of any domain"),
        pytest.param({b"knative-serving-revision": b"m-1", b"host": b"h"}, None, id="half of it"),
        pytest.param({**NAMED, b"knative-serving-revision": b""}, None, id="nothing said"),
        pytest.param({b"host": b"m-1.ns.svc"}, None, id="a host without a domain"),
        pytest.param({b"host": b"m.tenant.example.org"}, None, id="another host"),
        pytest.param({}, None, id="none at all"),
    ],
)
def test_revision_is_read_from_headers_or_host(headers: dict[bytes, bytes], want: tuple[str, str] | None) -> None:
    """Namespace and name."""
    assert parse_revision(headers) == want


@pytest.mark.parametrize(
    ("headers", "is_ready", "want"),
    [
        pytest.param({}, True, None, id="no probe"),
        pytest.param({b"k-network-probe": b""}, True, None, id="an empty one is none"),
        pytest.param({b"user-agent": b"kube-probe/1.36"}, True, (200, b""), id="a kubelet"),
        pytest.param({b"user-agent": b"kube-probe/1.36"}, False, (500, b"not ready"), id="a kubelet, too early"),
        pytest.param({b"k-kubelet-probe": b"x"}, True, (200, b""), id="a kubelet behind a mesh"),
        pytest.param({b"k-network-probe": b"activator"}, False, (200, b"activator"), id="an autoscaler"),
        pytest.param({b"k-network-probe": b"queue"}, True, (400, None), id="who looks for a pod"),
        pytest.param({b"k-network-probe": b"probe", b"k-network-hash": b"h"}, True, (200, b""), id="a gateway's"),
        pytest.param({b"k-network-probe": b"probe"}, True, (400, None), id="a gateway's without its hash"),
    ],
)
def test_probes_are_answered_with_their_body(
    headers: dict[bytes, bytes], is_ready: bool, want: tuple[int, bytes | None] | None
) -> None:
    """Status and body; a hash comes back."""
    said = answer_to_probe(headers, is_ready=is_ready)
    if want is None:
        assert said is None
        return
    assert said is not None
    assert said.status == want[0]
    assert want[1] in (None, said.body)
    assert said.headers == (((b"k-network-hash", b"h"),) if b"k-network-hash" in headers else ())
