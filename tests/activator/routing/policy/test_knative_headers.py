"""Knative's data path: the Revision of a request, and the answers to probes."""

import pytest

from activator.routing.policy.knative_headers import parse_revision, respond_to_probe

NAMED = {b"knative-serving-namespace": b"ns", b"knative-serving-revision": b"m-1"}


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        pytest.param(NAMED, ("ns", "m-1"), id="headers of a gateway"),
        pytest.param(
            {**NAMED, b"host": b"x-2.other.svc.cluster.local"},
            ("ns", "m-1"),
            id="headers take precedence over the host",
        ),
        pytest.param({b"host": b"m-1.ns.svc.cluster.local:80"}, ("ns", "m-1"), id="the host"),
        pytest.param({b"host": b"M-1.NS.svc.a.b"}, ("ns", "m-1"), id="a host in any case and domain"),
        pytest.param({b"knative-serving-revision": b"m-1", b"host": b"h"}, None, id="no namespace"),
        pytest.param({**NAMED, b"knative-serving-revision": b""}, None, id="an empty name"),
        pytest.param({b"host": b"m-1.ns.svc"}, None, id="a host without a domain"),
        pytest.param({b"host": b"m.tenant.example.org"}, None, id="another host"),
        pytest.param({}, None, id="no headers"),
    ],
)
def test_revision_is_read_from_headers_or_host(headers: dict[bytes, bytes], want: tuple[str, str] | None) -> None:
    assert parse_revision(headers) == want


@pytest.mark.parametrize(
    ("headers", "is_ready", "want"),
    [
        pytest.param({}, True, None, id="no probe"),
        pytest.param({b"k-network-probe": b""}, True, None, id="an empty probe header"),
        pytest.param({b"user-agent": b"kube-probe/1.36"}, True, (200, b""), id="a kubelet"),
        pytest.param({b"user-agent": b"kube-probe/1.36"}, False, (500, b"not ready"), id="a kubelet, too early"),
        pytest.param({b"k-kubelet-probe": b"x"}, True, (200, b""), id="a kubelet behind a mesh"),
        pytest.param({b"k-network-probe": b"activator"}, False, (200, b"activator"), id="an autoscaler"),
        pytest.param({b"k-network-probe": b"queue"}, True, (400, None), id="a probe for a pod"),
        pytest.param({b"k-network-probe": b"probe", b"k-network-hash": b"h"}, True, (200, b""), id="a gateway's"),
        pytest.param({b"k-network-probe": b"probe"}, True, (400, None), id="a gateway's without its hash"),
    ],
)
def test_probes_are_answered_with_their_body(
    headers: dict[bytes, bytes], is_ready: bool, want: tuple[int, bytes | None] | None
) -> None:
    """The answer has a status and a body, and returns the probe's hash."""
    answer = respond_to_probe(headers, is_ready=is_ready)
    if want is None:
        assert answer is None
        return
    assert answer is not None
    assert answer.status == want[0]
    assert want[1] in (None, answer.body)
    assert answer.headers == (((b"k-network-hash", b"h"),) if b"k-network-hash" in headers else ())
