"""What is behind an activator that is measured counts what it was told, and what it is told twice once."""

import http.client
import socket
from pathlib import Path

import msgspec
import pytest

from coldstart_bench.programs import Program
from coldstart_bench.traffic.behind import Behind, Seen
from contracts.control import RequestBatch
from contracts.wire import decode, encode
from service.unix import SocketDirectory
from tests.controlplane.usage_records import request_record

ONE, TWO = request_record(1), request_record(2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


def post(data: Path, name: str, path: str, body: bytes) -> None:
    """To one of its sockets."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = SocketDirectory(data / "run").connect(name, socket.SOCK_STREAM)
    connection.request("POST", path, body)
    assert connection.getresponse().read() is not None
    connection.close()


def ship_twice(data: Path) -> None:
    """The second time with one more, as a shipper does that was told nothing."""
    for records in ((ONE,), (ONE, TWO)):
        post(data, "control.sock", "/internal/v1/usage/requests", encode(RequestBatch(records=records)))


def test_front(data: Path) -> None:
    """Of three answers two have a record, whoever stayed to hear them: one went unrecorded."""
    with Program("front_upstream", str(data), "key", "50") as upstream:
        for _ in range(3):
            post(data, "rt-front.sock", "/v1/chat/completions", b"{}")
        ship_twice(data)
        assert (said := upstream.ask())["asked"] == 3
        assert said["recorded"] == 2


def test_slotted(data: Path) -> None:
    """Two records, in what it says and in what it writes."""
    behind, into = data / "behind", data / "seen"
    behind.write_bytes(msgspec.json.encode(Behind({"acme": "key"}, slots=1, slot_s=0.01)))
    with Program("slotted_upstream", str(data), str(behind)) as upstream:
        ship_twice(data)
        assert upstream.ask(into=str(into)) == {"records": 2}
    seen = decode(into.read_bytes(), Seen, what="what was seen")
    assert [record.request_id for record in seen.records] == ["req-1", "req-2"]
