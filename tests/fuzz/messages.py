"""Fuzz targets for input from sockets, the command line and the environment."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from activator.routing.policy.request_body import CompletionBody, PredictionBody
from activator.routing.request_routes import NoRoute, parse_host, route
from controlplane.ledger.policy.month import month_bounds_us
from controlplane.scaling.policy.scale_settings import ScaleChange, ScaleSettings
from kelvin.blobstore.s3_location import parse_s3_url
from kelvin.cli.base.rate_policy import parse_duration_s, parse_rate
from kelvin.contracts import setting_parser
from kelvin.contracts.accounting.usage import LifetimeRecord, Receipts
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import read_policy
from kelvin.contracts.artifacts.push_api import CommitRequest, MissingRequest
from kelvin.contracts.artifacts.runtime_control import BindPodRequest, BindRequest, GateJob, SealAttestation
from kelvin.contracts.errors import InvalidRequest, LimitExceeded
from kelvin.contracts.names import parse_address, parse_reference
from kelvin.contracts.problem import WireFailure, sse_error, to_wire
from kelvin.contracts.serving.control_messages import Feed, KeyRow, Principal, RequestBatch, RevisionRow, Scope, Stats
from kelvin.contracts.serving.stream_frames import (
    Counts,
    Frame,
    FrameDecoder,
    FrameKind,
    StreamEnd,
    encode_frame,
    failed_frame,
)
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.trace_context import parse as parse_traceparent
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.zygote_client import _Reply
from kelvin.telemetry.settings import read_settings as read_telemetry
from runtime.app.zygote import Fork, Ping, Reply
from runtime.surface.openai_answers import ChatStreamRenderer, ResponseMetadata, choose_renderer
from runtime.surface.openai_embeddings import EmbeddingCall, decode_embeddings
from runtime.surface.openai_requests import CompletionCall, decode_chat, decode_completion
from tests.fuzz.mutations import Inputs, change_json, change_words, happens
from tests.fuzz.oracle import FuzzTarget
from weightcache.client.lease_protocol import Layout, LeaseReply, LeaseRequest, SlabFact

# Frames of a replica's response. They must not depend on where the socket cuts them.

COUNTS: Final = Counts(5, 2, 3, 1_000_000)
FRAMES: Final = (
    encode_frame(Frame(FrameKind.DATA, COUNTS, b"data: {}\n\n"))
    + encode_frame(Frame(FrameKind.HEARTBEAT, COUNTS))
    + encode_frame(Frame(FrameKind.END, COUNTS, encode(StreamEnd(finish_reason="stop")))),
    failed_frame(to_wire(Overloaded("the queue", 4, 1.0)), COUNTS),
)


def _frames(data: bytes) -> tuple[Frame, ...]:
    return tuple(FrameDecoder().feed(data))


def _frames_hold(data: bytes, frames: tuple[Frame, ...]) -> None:
    decoder, random = FrameDecoder(), Random(len(data))
    cuts = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(4))})
    pieces = [frame for begin, end in pairwise(cuts) for frame in decoder.feed(data[begin:end])]
    assert tuple(pieces) == frames, "frames depend on where the socket cut them"


# Server-sent events. Kelvin has no reader of them, so the test reads them by the rules of the standard.


def events_of(stream: str) -> Iterator[tuple[str, str]]:
    """Yield type and data of each event, by the parsing rules of the HTML standard (9.2.6)."""
    kind, lines = "message", list[str]()
    for line in stream.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if lines:
                yield kind, "\n".join(lines)
            kind, lines = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            lines.append(value)
        elif field == "event":
            kind = value


def _read_stream(data: bytes) -> tuple[str, str]:
    """Render a text in two pieces and a failure's message as a stream. Return both as a client reads them."""
    text = data.decode("utf-8", "replace")
    renderer = choose_renderer(
        ResponseMetadata("r", text[:40], "ab" * 32, 1), chat=True, stream=True, include_usage=True
    )
    assert isinstance(renderer, ChatStreamRenderer)
    half = len(text) // 2
    written = renderer.begin() + renderer.text(text[:half]) + renderer.text(text[half:])
    written += renderer.end("stop", COUNTS) + sse_error(InvalidRequest("prompt", text, text), text[:20])
    events = list(events_of(written.decode()))
    (_, failed) = events.pop()
    assert events.pop() == ("message", "[DONE]")
    choices = [choice for _, event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), json.loads(failed)["error"]["message"]


def _texts_hold(data: bytes, texts: tuple[str, str]) -> None:
    text = data.decode("utf-8", "replace")
    assert texts[0] == text, "the client reads a text that the model did not write"
    assert "kv-" in text or texts[1] == f"prompt={text}: {text}"


# OpenAI requests.

CHAT: Final[dict[str, Any]] = {
    "model": "m@prod", "messages": [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None}, {"role": "developer", "content": "x", "name": "n"},
    ],
    "max_tokens": 4, "temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 7, "stop": ["a", "b"], "stream": True,
    "stream_options": {"include_usage": True}, "n": 1, "tools": [], "response_format": {"type": "text"},
}  # fmt: skip
COMPLETION: Final = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0, "echo": False, "suffix": ""}
EMBEDDINGS: Final = {"model": "m", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 32, "user": "u"}


def _json(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _call_holds(_: bytes, call: CompletionCall) -> None:
    assert call.max_tokens is None or call.max_tokens >= 1
    assert call.temperature is None or 0 <= call.temperature <= 2
    assert call.seed is None or -(1 << 63) <= call.seed < 1 << 63
    assert len(call.stops) <= 4
    assert all(call.stops)


def _inputs_hold(_: bytes, call: EmbeddingCall) -> None:
    assert 0 < len(call.inputs) <= 512
    for each in call.inputs:
        assert each, "an input is empty"
        assert isinstance(each, str) or all(type(token_id) is int for token_id in each)


# Messages between processes. The first byte chooses the message type.

KINDS: Final[tuple[Any, ...]] = (
    Fork | Ping, Reply, _Reply, LeaseRequest, LeaseReply, Layout, BindRequest, GateJob, Feed, Stats, RequestBatch,
    LifetimeRecord, Receipts, Principal, KeyRow, SealAttestation, WireFailure, MissingRequest, CommitRequest,
    ScaleChange, CompletionBody, PredictionBody, BindPodRequest,
)  # fmt: skip
MESSAGES: Final = (
    Fork(runtime_id="r1"), Reply(ok=True, pid=4), LeaseRequest(tenant="t", version="a" * 64),
    LeaseReply(ok=True, manifest_bytes=3, slabs=(SlabFact(id=1, bytes=4096),), chunks_by_tier={"host": 1}),
    Layout(total_bytes=4096, extents=((0, 0, 0, 4096),), attestations=()),
    BindRequest(tenant="t", model="m", version="a" * 64, device_class="cpu-1", threads=1, kv_bytes=1 << 26),
    GateJob(config_json="{}", tensors={"a": ("F32", (2, 3))}), Feed(revision=1, full=True), Receipts(receipts=()),
    Feed(revision=2, revisions=(RevisionRow(tenant="t", model="m", version="a" * 64, namespace="n", name="r-1"),)),
    Principal(key_id="k", tenant="t", scopes=(Scope.INFER,), models=("m",)), ScaleSettings(min=1, target=2.5),
    WireFailure(code="overloaded", status=503, message="full", retryable=True, retry_after_s=1.0),
    BindPodRequest(tenant="t", model="m", version="a" * 64, device_class="cpu-1", store="s3://b/p", weight_bytes=9),
)  # fmt: skip


def _kind(data: bytes) -> Any:
    return KINDS[data[0] % len(KINDS)] if data else KINDS[0]


def _decode_message(data: bytes) -> tuple[int, Any]:
    return (data[0] % len(KINDS) if data else 0), decode(data[1:], _kind(data))


def _encode_message(message: Any) -> bytes:
    at = next(at for at, kind in enumerate(KINDS) if isinstance(message, kind))
    return bytes([at]) + encode(message)


def _change_message(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    first = draw(_ANY_KIND) if happens(draw, 1) else data[:1]
    return first + change_json(draw, data[1:], [other[1:] for other in inputs])


_ANY_KIND: Final = st.sampled_from([bytes([at]) for at in range(len(KINDS))])


# One-line texts. The first byte chooses the parser, so append new parsers at the end.


def _with_bad_setting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that raises BadSetting instead of a ValueError with one of our own rules in its message."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            if not any(f": must be {rule}" in str(error) for rule in ("a whole number", "64K or more", "1048576G")):
                raise
            raise BadSetting("", str(error), "is refused") from None

    return read


PARSERS: Final[tuple[Callable[[str], Any], ...]] = (
    _with_bad_setting(parse_duration_s),
    _with_bad_setting(parse_rate),
    parse_reference,
    month_bounds_us,
    lambda text: parse_s3_url(text),
    lambda text: setting_parser.integer({"X": text}, "X", 1, low=-5, high=1 << 40),
    lambda text: setting_parser.number({"X": text}, "X", 1.0, low=0, high=10),
    lambda text: setting_parser.choice({"X": text}, "X", "a", ("a", "b")),
    lambda text: read_telemetry({"KELVIN_OTLP_ENDPOINT": text, "OTEL_EXPORTER_OTLP_HEADERS": text}),
    lambda text: parse_traceparent(text.encode("utf-8", "replace")),
    lambda text: parse_host([text.encode("utf-8", "replace")]),
    lambda text: route("GET", text.encode("utf-8", "replace"), "m.t.kelvin.test", "kelvin.test"),
    parse_address,
    lambda text: read_policy(text.encode("utf-8", "replace")),
)
LINES: Final = (
    "24h", "10M", "m@0123456789ab", "2026-11", "s3://bucket/pre/fix?endpoint=http://h:9000&region=eu&path_style=true",
    "8443", "0.5", "b", "https://collector.example:4318/v1", f"00-{'1' * 32}-{'2' * 16}-01", "m.t.kelvin.test:8443",
    "/t/m/v1/models/x@y", "t/m@0123456789ab",
)  # fmt: skip
POLICY: Final = b'{"format":1,"filters":[{"filter":"pii","input":{"US_SSN":"stop"},"phone_regions":["US"]}]}'
read_policy(POLICY)  # builds its decoder: otherwise the first parse would take other steps than later ones
_TOKENS: Final = (
    b"://", b"[", b"]", b"@", b":99999", b"?", b"&", b"%2e%2e", b"/../", b"//", b"s3://", b"http://", b"#",
    b"endpoint=", b"connections=", b"\xd9\xa3", b"1_0", b" 1", b"-0", b"nan", b"1e400", b"9" * 5000, b"\xe2\x84\x80",
)  # fmt: skip


def _read_line(data: bytes) -> Any:
    parse_reference.cache_clear()  # with a full cache, a second parse would take other steps
    return PARSERS[data[0] % len(PARSERS) if data else 0](data[1:].decode("utf-8", "replace"))


def _line_holds(data: bytes, value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert -(1 << 63) < value < 1 << 63  # also fails for NaN
    if isinstance(value, NoRoute):
        assert value.failure.message


TARGETS: Final = (
    FuzzTarget(
        "frames", _frames, (ValueError,), FRAMES, holds=_frames_hold,
        again=lambda frames: b"".join(encode_frame(frame) for frame in frames),
    ),
    FuzzTarget(
        "sse", _read_stream, (),
        (b"plain", b"data: [DONE]\n\n\r\rid: 1\nevent: error\n\n", "\u2028\u0085é💥".encode()), holds=_texts_hold,
    ),
    FuzzTarget("chat-request", decode_chat, (InvalidRequest,), _json(CHAT), change_json, holds=_call_holds),
    FuzzTarget(
        "completion-request", decode_completion, (InvalidRequest,), _json(COMPLETION), change_json, holds=_call_holds,
    ),
    FuzzTarget(
        "embeddings-request", lambda data: decode_embeddings(data, 32), (InvalidRequest, LimitExceeded),
        _json(EMBEDDINGS, {"input": "a"}), change_json, holds=_inputs_hold,
    ),
    FuzzTarget(
        "wire", _decode_message, (InvalidRequest,), tuple(map(_encode_message, MESSAGES)), _change_message,
        lambda message: bytes([message[0]]) + encode(message[1]),
    ),
    FuzzTarget(
        "lines", _read_line, (BadSetting, InvalidRequest, ArtifactRejected),
        (*(bytes([at]) + line.encode() for at, line in enumerate(LINES)), bytes([len(PARSERS) - 1]) + POLICY),
        change_words(*_TOKENS), holds=_line_holds,
    ),
)  # fmt: skip
