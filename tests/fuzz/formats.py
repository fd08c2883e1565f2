"""Fuzz targets for files on disks and in stores: manifests, model headers, packs, spools, meter pages, price books."""

import json
from base64 import b64decode, b64encode
from typing import Any, Final
from zlib import crc32

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from controlplane.billing.price_book import MAX_MICROS, BadPriceBook, parse_price_book
from controlplane.ledger.policy.rating import ANY_CLASS, PriceBook
from kelvin.blobstore.packs import PackEntry, assign_offsets, decode_footer, decode_table, encode_footer, encode_table
from kelvin.contracts.accounting.meter_format import Meter, Phase, decode_meter, encode_meter
from kelvin.contracts.artifact_errors import ArtifactRejected, ManifestCorrupt, PackCorrupt
from kelvin.contracts.artifacts.manifest import (
    DTYPE_BYTES,
    PAGE_BYTES,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    Tensor,
    decode_manifest,
    encode_manifest,
    version_of,
)
from kelvin.contracts.artifacts.push_api import PlanRequest
from kelvin.contracts.errors import InvalidRequest
from kelvin.contracts.wire import decode, encode
from kelvin.spool.frame import Frame, decode_frame, encode_frame
from kelvin.spool.segment_reader import encode_position
from runtime.encoder.recipe import read_recipe
from snapshotter.intake.policy.intake import Intake, admit
from snapshotter.intake.policy.safetensors_header import SourceTensor, parse_header
from snapshotter.intake.policy.strict_json import parse_object
from snapshotter.intake.policy.tensors_index import IndexEntry, parse_index
from tests.fuzz.mutations import Inputs, change_bytes, change_json, change_tree, change_words, dumped, happens
from tests.fuzz.oracle import FuzzTarget
from tests.snapshotter.models import Model, default_weights, resharded, safetensors
from tests.snapshotter.tensors_files import TensorsFile

SIZE_BYTES: Final = 8  # in front of an input whose parser needs the size of the whole file
D, E = "a" * 64, "b" * 64


def sized(raw: bytes, size: int) -> bytes:
    """Return an input: the size of the file, then the part of it that is parsed."""
    return (size % (1 << 64)).to_bytes(SIZE_BYTES, "little") + raw


def unsized(data: bytes) -> tuple[bytes, int]:
    """Return the part that is parsed, and the size of the file."""
    return data[SIZE_BYTES:], int.from_bytes(data[:SIZE_BYTES], "little")


# Manifests. The version is computed from the changed bytes, so that the digest check does not refuse everything.

MANIFEST: Final = Manifest(
    format=1,
    engine=Engine(1, "LlamaForCausalLM", "bfloat16"),
    limits=Limits(127, 64),
    chunk_bytes=2 * PAGE_BYTES,
    files=(PinnedFile("config.json", 0, 10, D),),
    tensors=(Tensor("a", "BF16", (2, 3), PAGE_BYTES), Tensor("b", "F32", (), 2 * PAGE_BYTES)),
    chunks=(Chunk(D, PAGE_BYTES), Chunk(E, 2 * PAGE_BYTES)),
)


def _manifest_holds(data: bytes, value: Manifest) -> None:
    assert encode_manifest(value) == data, "one version has two forms"
    end = 0
    for offset, nbytes in [(f.offset, f.size) for f in value.files] + [(t.offset, t.nbytes) for t in value.tensors]:
        assert end <= offset, "two of its parts share bytes"
        end = offset + nbytes
    assert end <= value.total_bytes < 1 << 80


# Safetensors headers. After most changes of the JSON, its length prefix and the file's size are corrected.


def _parse_header(data: bytes) -> tuple[SourceTensor, ...]:
    raw, size = unsized(data)
    return parse_header("model.safetensors", raw, size)


def _header_holds(data: bytes, tensors: tuple[SourceTensor, ...]) -> None:
    raw, size = unsized(data)
    at = len(raw)
    for tensor in tensors:
        assert tensor.offset == at, "a byte belongs to no tensor, or to two"
        at += tensor.nbytes
    assert at == size


def _change_header(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    raw, size = unsized(data)
    before = size - len(raw)
    body = change_json(draw, raw[8:], [unsized(other)[0][8:] for other in inputs])
    if happens(draw, 1):
        return sized(raw[:8] + body, size)
    changed = len(body).to_bytes(8, "little") + body
    return sized(changed, size if happens(draw, 1) else max(0, before) + len(changed))


def _safetensors(weights: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    whole = safetensors(weights, metadata)
    return sized(whole[: 8 + int.from_bytes(whole[:8], "little")], len(whole))


# Tensorizer files.


def _parse_index(data: bytes) -> tuple[IndexEntry, ...]:
    raw, size = unsized(data)
    return parse_index("model.tensors", raw, size)


def _index_holds(data: bytes, entries: tuple[IndexEntry, ...]) -> None:
    raw, size = unsized(data)
    at = len(raw)
    for entry in entries:
        assert entry.header_offset == at < entry.tensor.offset, "a byte belongs to no tensor, or to two"
        at = entry.tensor.offset + entry.tensor.nbytes
    assert at + 8 == size
    assert len({entry.tensor.name for entry in entries}) == len(entries)


def _tensors(**changes: Any) -> bytes:
    whole = TensorsFile(default_weights(layers=1), index_bytes=512, **changes).build()
    return sized(whole[: 73 + 512], len(whole))


# Packs.

ENTRIES: Final = assign_offsets([(D, PAGE_BYTES), (E, 3 * PAGE_BYTES), ("c" * 64, 2 * PAGE_BYTES)])


def _footer(entries: tuple[PackEntry, ...]) -> bytes:
    footer = encode_footer(entries)
    return sized(footer, sum(entry.length for entry in entries) + len(footer))


def _entries_hold(data: bytes, entries: tuple[PackEntry, ...]) -> None:
    end = 0
    for entry in entries:
        assert entry.offset >= end, "two chunks share bytes"
        end = entry.offset + entry.length
    assert len({entry.digest for entry in entries}) == len(entries)


def _change_footer(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    raw, size = unsized(data)
    if happens(draw, 4):
        return change_bytes(draw, data, inputs)
    table = change_json(draw, raw[:-16], [unsized(other)[0][:-16] for other in inputs])
    return sized(table + len(table).to_bytes(8, "little") + raw[-8:], size - len(raw) + 16 + len(table))


# Spool segments. After most changes, the checksums are corrected.


def _frames_of(segment: bytes) -> tuple[Frame, ...]:
    found, offset = [], 0
    while (frame := decode_frame(segment, offset)) is not None:
        found.append(frame)
        offset = frame.end
    return tuple(found)


def _segment_of(frames: tuple[Frame, ...]) -> bytes:
    return b"".join(encode_frame(frame.sequence, frame.payload) for frame in frames)


def _segment_holds(data: bytes, frames: tuple[Frame, ...]) -> None:
    assert data.startswith(_segment_of(frames)), "what was read is not what lies there"


def _change_segment(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    changed = bytearray(change_bytes(draw, data, inputs))
    if not happens(draw, 3):
        at = 0
        while at + 16 <= len(changed):
            length = int.from_bytes(changed[at : at + 4], "little")
            record = changed[at + 8 : at + 16 + length]
            changed[at + 4 : at + 8] = crc32(record).to_bytes(4, "little")
            at += 16 + length
    return bytes(changed)


# Model directories. Either one file of a plan request is changed, or the request.


def _admit(data: bytes) -> Intake:
    return admit(decode(data, PlanRequest))


def _change_request(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    if happens(draw, 3):
        return change_json(draw, data, inputs)
    try:
        fields = json.loads(data)
        file = draw(st.sampled_from(fields["small_files"]))
        tree = json.loads(b64decode(file["content"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return change_json(draw, data, inputs)
    file["content"] = b64encode(dumped(draw, change_tree(draw, tree, tree))).decode()
    return json.dumps(fields).encode()


def _intake_holds(_: bytes, intake: Intake) -> None:
    assert all(tensor.nbytes >= 0 and tensor.name.encode() for tensor in intake.tensors)
    assert {"config.json", "tokenizer.json"} <= {file.path for file in intake.files}


def _recipe(data: bytes) -> Any:
    files = {name: json.dumps(content).encode() for name, content in parse_object(data, "recipe").items()}
    return read_recipe(files)


RECIPE: Final = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None},
    "tokenizer_config.json": {"model_max_length": 512},
}

# Price books.

BOOK: Final = b"""currency = "USD"
[[prices]]
from = 2026-01-01
per_tokens = 1_000_000
prompt = 500_000
cached = 50_000
completion = 1_500_000
request = 0
[prices.device."*"]
restore = 20
active = 40
idle = 10
[[prices]]
from = 2026-03-01
per_tokens = 1000
prompt = 1
cached = 0
completion = 2
request = 3
device = { "*" = { restore = 0, active = 0, idle = 0 }, "cpu-2" = { restore = 1, active = 2, idle = 3 } }
"""


def _book_holds(_: bytes, book: PriceBook) -> None:
    dates = [prices.from_us for prices in book.prices]
    assert dates == sorted(set(dates))
    assert all(ANY_CLASS in prices.device for prices in book.prices)
    for prices in book.prices:
        for amount in (prices.prompt, prices.cached, prices.completion, prices.request):
            assert 0 <= amount <= MAX_MICROS


_METER = Meter(Phase.ACTIVE, 5, 7, (1, 2, 3, 4), 9, "acme", "chat", "ab" * 32, "cpu-2")

TARGETS: Final = (
    FuzzTarget(
        "manifest", lambda data: decode_manifest(data, version_of(data)), (ManifestCorrupt,),
        (encode_manifest(MANIFEST),), change_json, encode_manifest, _manifest_holds,
    ),
    FuzzTarget(
        "safetensors-header", _parse_header, (ArtifactRejected,),
        (
            _safetensors(default_weights(layers=1)), _safetensors({}, {"format": "pt"}),
            _safetensors({dtype: default_weights()["model.norm.weight"] for dtype in DTYPE_BYTES}),
        ),
        _change_header, holds=_header_holds,
    ),
    FuzzTarget(
        "tensors-index", _parse_index, (ArtifactRejected,),
        (_tensors(), _tensors(version=5, flags=2)), change_bytes, holds=_index_holds,
    ),
    FuzzTarget(
        "pack-index", lambda data: decode_table(data, "p"), (PackCorrupt,),
        (encode_table(ENTRIES), b"[]"), change_json, encode_table, _entries_hold,
    ),
    FuzzTarget(
        "pack-footer", lambda data: decode_footer(*unsized(data), "p"), (PackCorrupt,),
        (_footer(ENTRIES), _footer(())), _change_footer, holds=_entries_hold,
    ),
    FuzzTarget(
        "spool-segment", _frames_of, (),
        (encode_frame(1, b"{}") + encode_frame(2, b"x" * 300) + bytes(64), encode_position(7)),
        _change_segment, _segment_of, _segment_holds,
    ),
    FuzzTarget(
        "meter-page", decode_meter, (ValueError,),
        (encode_meter(_METER, 2) * 2, encode_meter(_METER, 3) + encode_meter(_METER, 2)), change_bytes,
        lambda meter: encode_meter(meter, 2),
    ),
    FuzzTarget(
        "model-directory", _admit, (ArtifactRejected, InvalidRequest),
        (
            encode(Model().request()),
            encode(Model(shards=resharded(default_weights(), 3, 1)).request()),
            encode(Model(without=frozenset({"config.json"})).request()),
        ),
        _change_request, holds=_intake_holds,
    ),
    FuzzTarget(
        "embedding-recipe", _recipe, (ArtifactRejected,), (json.dumps(RECIPE).encode(),), change_json,
    ),
    FuzzTarget(
        "price-book", lambda data: parse_price_book(data.decode("utf-8", "replace"), "book.toml"), (BadPriceBook,),
        (BOOK,),
        change_words(
            b"[[prices]]\n", b'[prices.device."cpu-4"]\n', b"from = 0001-01-01\n", b"= 9999-12-31\n", b"= true", b"[",
            b"= 1e3", b"= 0x" + b"f" * 5000, b"= " + b"9" * 5000, b"[" * 3000, b"= inf", b'"""',
            b"= 2026-01-01T00:00:00Z", b"{ a = 1 }", b"prompt.cached = 1\n", b"\xff",
        ),
        holds=_book_holds,
    ),
)  # fmt: skip
