"""The encoding of stats for Knative's autoscaler, byte for byte. Also negative controls of the fake autoscaler."""

import math
from pathlib import Path

import pytest
from aiohttp import WSMessage, WSMsgType
from grpc_tools import protoc

from activator.scale_link import stat_encoding
from activator.scale_link.stat_encoding import RevisionStat, encode_stats, message_class
from tests.activator.scale_link.knative_autoscaler import faults

GOLDEN = bytes.fromhex(
    "0a330a0764656661756c7412076d2d30303030311a1f0a0b616374697661746f722d3011000000000000f03f21000000000000f03f"
)  # what Knative's own activator sends for the first request of a Revision
ONE = RevisionStat("default", "m-00001", 1.0, 1)


def test_the_first_stat_is_that_of_knatives_own_activator() -> None:
    assert encode_stats("activator-0", [ONE]) == GOLDEN


def test_several_revisions_share_a_message() -> None:
    """The order is kept. A zero is encoded as a missing field."""
    message = message_class().FromString(encode_stats("a", [ONE, RevisionStat("other", "x-00002", 0.0, 0)]))
    assert [(each.namespace, each.name, each.stat.request_count) for each in message.messages] == [
        ("default", "m-00001", 1.0),
        ("other", "x-00002", 0.0),
    ]
    assert message.messages[1].stat.average_concurrent_requests == 0.0


def test_the_descriptors_are_made_of_the_proto(tmp_path: Path) -> None:
    """Compiling the proto file gives the same bytes. Another field number gives others."""
    source = stat_encoding.DESCRIPTORS.with_name("stats.proto")

    def made(text: str) -> bytes:
        (tmp_path / "stats.proto").write_text(text)
        out = tmp_path / "stats.binpb"
        assert protoc.main(["protoc", f"-I{tmp_path}", f"--descriptor_set_out={out}", "stats.proto"]) == 0
        return out.read_bytes()

    text = source.read_text()
    assert made(text) == stat_encoding.DESCRIPTORS.read_bytes()
    assert made(text.replace("double request_count = 4", "double request_count = 8")) != made(text)


def _stat(**fields: object) -> bytes:
    message = message_class()()
    each = message.messages.add(namespace="default", name="m-00001")
    each.stat.pod_name = "a"
    for name, value in fields.items():
        setattr(each.stat, name, value)
    encoded: bytes = message.SerializeToString()
    return encoded


@pytest.mark.parametrize(
    ("kind", "data", "fault"),
    [
        pytest.param(WSMsgType.BINARY, GOLDEN, None, id="a valid message passes"),
        pytest.param(WSMsgType.TEXT, "{}", "a frame of type", id="text"),
        pytest.param(WSMsgType.BINARY, b"\xff\xff", "no message", id="not protobuf"),
        pytest.param(WSMsgType.BINARY, GOLDEN[:-3], "no message", id="cut off"),
        pytest.param(WSMsgType.BINARY, b"", "an empty message", id="empty"),
        pytest.param(WSMsgType.BINARY, GOLDEN + b"\x10\x01", "unknown fields", id="an unknown field"),
        pytest.param(WSMsgType.BINARY, GOLDEN + GOLDEN, "twice", id="a revision twice, which would add up"),
        pytest.param(WSMsgType.BINARY, encode_stats("a", [ONE._replace(name="x")]), "unknown revision", id="unknown"),
        pytest.param(WSMsgType.BINARY, encode_stats("", [ONE]), "no pod name", id="no pod name"),
        pytest.param(WSMsgType.BINARY, encode_stats("a", [ONE._replace(concurrency=-1)]), "-1", id="negative"),
        pytest.param(
            WSMsgType.BINARY, encode_stats("a", [ONE._replace(concurrency=math.nan)]), "nan", id="not a number"
        ),
        pytest.param(WSMsgType.BINARY, _stat(timestamp=1), "an old timestamp", id="old"),
        pytest.param(
            WSMsgType.BINARY, _stat(proxied_request_count=1.0), "queue-proxy", id="a field for queue-proxy only"
        ),
    ],
)
def test_control_fake_autoscaler_detects_dropped_stats(kind: WSMsgType, data: bytes | str, fault: str | None) -> None:
    """Negative controls of the fake autoscaler."""
    found = faults(WSMessage(kind, data, None), {"default/m-00001"})
    assert not found if fault is None else any(fault in each for each in found), found


def test_a_message_without_a_stat_is_found() -> None:
    """Knative's autoscaler ignores such a message."""
    body = message_class()()
    body.messages.add(namespace="default", name="m-00001")
    encoded = body.SerializeToString()
    assert faults(WSMessage(WSMsgType.BINARY, encoded, None), {"default/m-00001"}) == ["default/m-00001: no stat"]
