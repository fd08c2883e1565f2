"""The fake upstream behind a measured activator counts each usage record once."""

import http.client
import socket
from pathlib import Path

import pytest

from coldstart_bench.harness.activator_testbed import UpstreamConfig, UpstreamReport, one_model, running_upstream
from kelvin.contracts.serving.control_messages import RequestBatch
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.socket_directory import SocketDirectory
from tests.controlplane.usage_records import request_record

ONE, TWO = request_record(1), request_record(2)


FEED = one_model({"acme": "key"}, slots=1)


def post(scratch: Path, name: str, path: str, body: bytes, request_id: str = "req-1") -> bytes:
    """Return the body of the answer from one of its sockets."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = SocketDirectory(scratch / "data" / "run").connect(name, socket.SOCK_STREAM)
    connection.request("POST", path, body, {"x-kelvin-request-id": request_id})
    said = connection.getresponse().read()
    connection.close()
    return said


def ship_twice(scratch: Path) -> None:
    """Ship one record, then again with a second one, as a shipper does that got no answer."""
    for records in ((ONE,), (ONE, TWO)):
        post(scratch, "control.sock", "/internal/v1/usage/requests", encode(RequestBatch(records=records)))


@pytest.mark.parametrize(("keeps_records", "kept"), [(True, ["req-1", "req-2"]), (False, [])])
def test_each_record_is_counted_once(tmp_path: Path, keeps_records: bool, kept: list[str]) -> None:
    """Two of three answered requests lack a record, and one record has no answer. Repeats count once."""
    into = tmp_path / "seen"
    with running_upstream(tmp_path, UpstreamConfig(FEED, keeps_records=keeps_records)) as upstream:
        for request_id in ("req-1", "req-7", "req-8", "req-8"):
            post(tmp_path, "rt-slots.sock", "/v1/chat/completions", b"{}", request_id)
        ship_twice(tmp_path)
        said = upstream.call(into=str(into))
    assert (said["recorded"], said["unrecorded"]) == (2, 2)
    seen = decode(into.read_bytes(), UpstreamReport, field="what was seen")
    assert [record.request_id for record in seen.records] == kept


def test_completion_takes_a_slot_and_names_its_tenant(tmp_path: Path) -> None:
    """A completion occupies a slot, and its text is the lengths of prompt and answer. A chat occupies none."""
    into = tmp_path / "seen"
    with running_upstream(tmp_path, UpstreamConfig(FEED, slot_s=0.01)) as upstream:
        post(tmp_path, "rt-slots.sock", "/v1/chat/completions", b"{}")
        assert b'"3 5"' in post(tmp_path, "rt-slots.sock", "/v1/completions", b'{"prompt":"a b c","max_tokens":5}')
        upstream.call(into=str(into))
    seen = decode(into.read_bytes(), UpstreamReport, field="what was seen")
    assert (seen.answered, seen.most_inside) == (1, 1)
