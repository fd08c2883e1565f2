"""Every parser returns a valid value or one of its refusals, whatever the input.

Every run fuzzes for a short time, `make deep` for longer (`KELVIN_TEST_FUZZ_INPUTS` inputs per target), and `make fuzz
SECONDS=600` as long as needed. Each target has a control: the fuzzer finds a parser with one check removed.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import pytest

import activator.auth.claims_policy
import activator.auth.key_set_policy
import controlplane.backup.archive
import controlplane.billing.price_book
import controlplane.ledger.usage_batches
import kelvin.blobstore.packs
import kelvin.contracts.accounting.meter_format
import kelvin.contracts.artifacts.attestation
import kelvin.contracts.artifacts.manifest
import kelvin.contracts.serving.stream_frames
import kelvin.spool.frame
import runtime.encoder.recipe
import runtime.surface.open_inference_codec
import runtime.surface.openai_answers
import runtime.surface.openai_embeddings
import runtime.surface.openai_requests
import snapshotter.intake.policy.intake
import snapshotter.intake.policy.onnx_graph
import snapshotter.intake.policy.predictor_intake
import snapshotter.intake.policy.safetensors_header
import snapshotter.intake.policy.tensors_index
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import Scope
from tests.fuzz import formats, messages
from tests.fuzz.oracle import MEMORY_BYTES, FuzzFinding, FuzzTarget, find, judge
from tests.fuzz.targets import TARGETS, corpus_of

SHORT: Final = 100  # inputs per target
LONG: Final = int(os.environ.get("KELVIN_TEST_FUZZ_INPUTS", "1000"))
CONTROL: Final = 4000  # inputs within which a broken parser is found

Patch = Callable[[pytest.MonkeyPatch], None]


def look(name: str, seed: int, inputs: int) -> FuzzFinding | None:
    """Return a finding in the samples, the corpus or the first `inputs` changed inputs of a seed."""
    target = TARGETS[name]
    return find(target, list(corpus_of(target).values()), seed=seed, inputs=inputs)


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_and_fixed_seed_have_no_finding(name: str) -> None:
    assert look(name, seed=1, inputs=SHORT) is None


@pytest.mark.deep
@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs_have_no_finding(name: str) -> None:
    assert look(name, seed=2, inputs=LONG) is None


def _without(module: object, name: str, instead: object = lambda *_: None) -> Patch:
    return lambda patch: patch.setattr(module, name, instead)


def _unescaped(heading: object, kind: str, choices: Sequence[Any], usage: object) -> bytes:
    text = choices[0].delta.content if choices else ""
    return f'{{"choices":[{{"delta":{{"content":"{text or ""}"}}}}]}}'.encode()


def _cut(segment: bytes, offset: int) -> kelvin.spool.frame.Frame | None:
    found = kelvin.spool.frame.decode_frame(segment, offset)
    return found and kelvin.spool.frame.Frame(found.sequence, found.payload[:-1] or b"x", found.end)


class _Forgetful(kelvin.contracts.serving.stream_frames.FrameDecoder):
    """A decoder that forgets an incomplete frame between two feeds."""

    def feed(self, data: bytes) -> list[kelvin.contracts.serving.stream_frames.Frame]:
        self._parts.clear()
        return super().feed(data)


def _loads(raw: Any, path: str) -> Any:
    return json.loads(bytes(raw))


# Each control removes one check of a parser, or does one thing wrongly.
CONTROLS: Final[dict[str, Patch]] = {
    "manifest": _without(kelvin.contracts.artifacts.manifest, "find_manifest_fault"),
    "token": _without(activator.auth.claims_policy, "_scopes", lambda *_: tuple(Scope)),
    "key-set": _without(activator.auth.key_set_policy, "_PUBLIC", ("kty", "d")),
    "safetensors-header": _without(snapshotter.intake.policy.safetensors_header, "_check_cover"),
    "tensors-index": _without(snapshotter.intake.policy.tensors_index, "_check_cover"),
    "pack-index": _without(kelvin.blobstore.packs, "_find_fault"),
    "pack-footer": _without(kelvin.blobstore.packs, "_find_fault"),
    "spool-segment": _without(formats, "decode_frame", _cut),
    "meter-page": _without(kelvin.contracts.accounting.meter_format, "METER_BYTES", 16),
    "model-directory": _without(snapshotter.intake.policy.intake, "parse_object", _loads),
    "embedding-recipe": _without(runtime.encoder.recipe, "json_object", lambda files, name: json.loads(files[name])),
    "price-book": _without(controlplane.billing.price_book, "_micros", lambda field, value: value),
    "frames": _without(messages, "FrameDecoder", _Forgetful),
    "sse": _without(runtime.surface.openai_answers, "_encode", _unescaped),
    "chat-request": _without(runtime.surface.openai_requests, "_check_range"),
    "completion-request": _without(runtime.surface.openai_requests, "_check_range"),
    "embeddings-request": _without(runtime.surface.openai_embeddings, "_is_ids", bool),
    "wire": _without(messages, "decode", lambda raw, kind: msgspec.json.decode(raw, type=kind)),
    "envelope": _without(kelvin.contracts.artifacts.attestation, "is_signed_by", lambda *_: True),
    "statement": _without(kelvin.contracts.artifacts.attestation, "decoder", msgspec.json.Decoder),
    "file-index": _without(kelvin.blobstore.packs, "_find_index_fault"),
    "onnx-graph": _without(snapshotter.intake.policy.onnx_graph, "_shape", lambda name, message: (4,)),
    "signature-file": _without(snapshotter.intake.policy.predictor_intake, "find_invalid_value"),
    "prediction-request": _without(runtime.surface.open_inference_codec, "find_invalid_value"),
    "backup": _without(
        controlplane.backup.archive, "_skip_padding", lambda archive, size, _: archive.read(-size % 512)
    ),
    "journal-entry": _without(controlplane.ledger.usage_batches, "decoder", msgspec.json.Decoder),
    "lines": _without(messages, "parse_s3_url", urlsplit),
}


def test_each_target_has_a_control() -> None:
    assert CONTROLS.keys() == TARGETS.keys()


@pytest.mark.deep
@pytest.mark.parametrize("name", CONTROLS)
def test_control(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer has a finding in the same parser once it is broken."""
    CONTROLS[name](monkeypatch)
    assert look(name, seed=2, inputs=CONTROL) is not None


def _parser(parse: Callable[[bytes], Any], **more: Any) -> FuzzTarget:
    return FuzzTarget("toy", parse, (InvalidRequest,), (b'{"a": [1, 2]}',), **more)


class _Mute:
    def __str__(self) -> str:
        raise ValueError("no text")


def _refuses(message: str, param: Any = "body") -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        raise Refused(InvalidRequest(param, message, "is refused"))

    return parse


def _spins(data: bytes) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        pytest.param(_parser(lambda data: data[999]), "it raised IndexError", id="another exception"),
        pytest.param(_parser(_refuses("x" * 9999)), "its refusal has", id="a refusal that repeats the input"),
        pytest.param(
            _parser(_refuses("x", param=_Mute())), "its refusal can't be rendered", id="a refusal without a text"
        ),
        pytest.param(_parser(lambda data: bytes(2 * MEMORY_BYTES)), "it asked for more than", id="too much memory"),
        pytest.param(_parser(len, again=lambda size: bytes(size + 1)), "another value", id="an encoder that disagrees"),
        pytest.param(_parser(len, holds=lambda data, size: _spins(data)), "it took more than", id="too much time"),
    ],
)
def test_each_wrong_answer_is_a_finding(target: FuzzTarget, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.oracle.CPU_S", 0.2)
    assert fault in (judge(target, target.samples[0]) or "")


def test_finding_is_shrunk() -> None:
    """A finding is the valid input with only the change that causes the fault."""
    target = _parser(lambda data: 1 // (b"[]" not in data))
    found = find(target, (), seed=1, inputs=1000)
    assert found == FuzzFinding(b'{"a": []}', "it raised ZeroDivisionError: integer division or modulo by zero")
