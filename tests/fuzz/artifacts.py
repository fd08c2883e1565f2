"""Fuzz targets for data beside weights: attestations, predictors and their signatures, kept files, backups."""

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis.strategies import DrawFn

from controlplane.backup.archive import ArchiveWriter, BadBackup, unpack
from controlplane.ledger.ledger_journal import decode_entry, encode_entry
from controlplane.ledger.usage_batches import Unreadable
from kelvin.blobstore.packs import FileChunk, FileIndex, FileSpan, decode_file_index, encode_file_index
from kelvin.contracts.accounting.backup_reports import BACKUP_FORMAT, BackupIndex
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.artifact_errors import ArtifactRejected, AttestationInvalid, PackCorrupt
from kelvin.contracts.artifacts.attestation import (
    ORIGIN_TYPE,
    SEAL_TYPE,
    Claims,
    OriginPredicate,
    TrainingData,
    encode_envelope,
    encode_statement,
    open_envelope,
    pre_authentication_encoding,
    read_origin,
    read_seal,
)
from kelvin.contracts.artifacts.manifest import PAGE_BYTES, pad_to_page
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.artifacts.tensor_schema import ANY_EXTENT, Signature, find_invalid_value, find_signature_fault
from kelvin.contracts.errors import InvalidRequest, LimitExceeded, SchemaMismatch
from kelvin.crypto.signing_keys import Signer
from runtime.surface.open_inference_codec import PredictionCall, decode_prediction
from snapshotter.intake.policy.onnx_graph import read_graph
from snapshotter.intake.policy.predictor_intake import admit_predictor
from tests.controlplane.usage_records import lifetime_record, request_record
from tests.fuzz.mutations import Inputs, change_bytes, change_json, happens
from tests.fuzz.oracle import FuzzTarget
from tests.runtime.predictor.models import classifier, picky, regression, request_of, signature_of
from tests.weightcache.kit import attestation_of

VERSION: Final = "a" * 64
SIGNER: Final = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))

# Attestations. No change may leave a signed envelope valid. Changed statements are signed again and then read.

STATED: Final = OriginPredicate(
    signed_at_s=1_795_000_000,
    claims=Claims(
        licence="Apache-2.0",
        training_data=TrainingData(name="books", sha256="c" * 64),
        metrics={"perplexity": 12.5, "tiny": 1e-9},
        provenance={"commit": "größer"},
    ),
    bundle="d" * 64,
)
_SEAL: Final = attestation_of(VERSION)
SIGNED: Final = (SIGNER.attest(VERSION, ORIGIN_TYPE, STATED), SIGNER.attest(VERSION, SEAL_TYPE, _SEAL))


def _envelope_holds(data: bytes, _: Any) -> None:
    assert data in SIGNED, "an envelope that was not signed is accepted"


def _read_statement(payload: bytes) -> OriginPredicate | SealAttestation:
    """Sign `payload` and read it, so that the code behind the signature check is reached."""
    raw = encode_envelope(payload, SIGNER.key_id, SIGNER.sign(pre_authentication_encoding(payload)))
    if SEAL_TYPE.encode() in payload:
        return read_seal(raw, VERSION).seal
    return read_origin(raw, VERSION)[0]


def _statement_of(value: OriginPredicate | SealAttestation) -> bytes:
    return encode_statement(VERSION, ORIGIN_TYPE if isinstance(value, OriginPredicate) else SEAL_TYPE, value)


# Indexes of tensorizer files that are kept as they are.

INDEX: Final = FileIndex(
    (
        FileChunk("a" * 64, (FileSpan(100, PAGE_BYTES + 1),)),
        FileChunk("b" * 64, (FileSpan(9000, 5), FileSpan(9100, PAGE_BYTES))),
    ),
    100_000,
)


def _index_holds(_: bytes, index: FileIndex) -> None:
    spans = sorted((span.offset, span.length) for chunk in index.chunks for span in chunk.spans)
    end = 0
    for offset, length in spans:
        assert offset >= end, "two chunks share bytes"
        end = offset + length
    assert end <= index.size
    for chunk in index.chunks:
        assert chunk.length == sum(pad_to_page(span.length) for span in chunk.spans)


# Graphs and signatures of predictors, and prediction requests.


def _graph_holds(_: bytes, tensors: Any) -> None:
    inputs, outputs = tensors
    assert inputs, "a graph without an input"
    assert outputs, "a graph without an output"
    assert all(spec.shape and spec.shape[0] == ANY_EXTENT for spec in (*inputs, *outputs))


SIGNATURE_FILE: Final = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "columns": ["a", "b"], "examples": [1, 2.5]}],
    "outputs": [{"name": "label"}],
}


def _signature(data: bytes) -> Signature:
    return admit_predictor(request_of(_CLASSIFIER, data)).signature


def _signature_holds(_: bytes, signature: Signature) -> None:
    assert find_signature_fault(signature) is None
    for spec in signature.inputs:
        assert find_invalid_value(spec.examples, spec.datatype) is None
        assert not spec.columns or len(spec.columns) == spec.shape[1]


_CLASSIFIER: Final = classifier().SerializeToString()
_COLOURS: Final = signature_of(picky())
_NUMBERS: Final = signature_of(_CLASSIFIER)
MAX_ROWS: Final = 8


def _prediction_request(data: bytes) -> PredictionCall:
    signature = _COLOURS if b'"colour"' in data else _NUMBERS
    return decode_prediction(data, signature, MAX_ROWS)


def _prediction_request_holds(_: bytes, call: PredictionCall) -> None:
    assert 1 <= call.rows <= MAX_ROWS
    for given in call.inputs:
        size = 1
        for extent in given.shape:
            size *= extent
        assert len(given.values) == size, "values and shape disagree"
        assert given.shape == (call.rows, *given.spec.shape[1:])
        assert find_invalid_value(given.values, given.spec.datatype) is None


PREDICTION_REQUESTS: Final = (
    {"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [-3, 4]]}], "id": "one"},
    {
        "inputs": [{"name": "colour", "shape": [1, 1], "datatype": "BYTES", "data": ["red"]}],
        "outputs": [{"name": "hot", "parameters": {"classification": 0}}],
        "parameters": {"schema_hash": _COLOURS.schema_hash},
    },
)

# Backups, and entries of the ledger's journal.


def _backup(index: bytes | None = None, contents: bytes = b"rows") -> bytes:
    packing = ArchiveWriter()
    made = b"".join(packing.content_pieces("kelvin.db", contents)) + b"".join(
        packing.content_pieces("ca.pem", b"x" * 700)
    )
    index_document = BackupIndex(
        format=BACKUP_FORMAT, made_at_us=7, program="0", journal_after=None, members=tuple(packing.members), versions=()
    )
    return made + b"".join(packing.end_pieces(index_document))


def _unpacked(data: bytes) -> tuple[BackupIndex, tuple[bytes, ...]]:
    with TemporaryDirectory() as directory:
        places = {name: Path(directory) / name for name in ("kelvin.db", "ca.pem")}
        index = unpack(io.BytesIO(data), places)
        return index, tuple(places[member.name].read_bytes() for member in index.members)


def _backup_holds(data: bytes, _: Any) -> None:
    assert data in BACKUPS, "a changed backup is accepted"


BACKUPS: Final = (_backup(), _backup(contents=b""))


def _change_entry(draw: DrawFn, data: bytes, inputs: Inputs) -> bytes:
    """Mostly keep the first byte, which is the entry's kind, and change the JSON after it as a tree."""
    if happens(draw, 2):
        return change_bytes(draw, data, inputs)
    return data[:1] + change_json(draw, data[1:], [other[1:] for other in inputs])


def _entry_holds(_: bytes, entry: Any) -> None:
    assert isinstance(entry, RequestRecord | LifetimeRecord | Unreadable), (
        "a closing is packed, and was made of nothing"
    )


TARGETS: Final = (
    FuzzTarget(
        "envelope", lambda data: open_envelope(data, VERSION), (AttestationInvalid,), SIGNED, change_json,
        holds=_envelope_holds,
    ),
    FuzzTarget(
        "statement", _read_statement, (AttestationInvalid,),
        (encode_statement(VERSION, ORIGIN_TYPE, STATED), encode_statement(VERSION, SEAL_TYPE, _SEAL)),
        change_json, _statement_of,
    ),
    FuzzTarget(
        "file-index", lambda data: decode_file_index(data, "p"), (PackCorrupt,), (encode_file_index(INDEX),),
        change_json, encode_file_index, _index_holds,
    ),
    FuzzTarget(
        "onnx-graph", read_graph, (ArtifactRejected,),
        (_CLASSIFIER, regression().SerializeToString(), picky().SerializeToString()), change_bytes, holds=_graph_holds,
    ),
    FuzzTarget(
        "signature-file", _signature, (ArtifactRejected,), (json.dumps(SIGNATURE_FILE).encode(), b"{}"), change_json,
        holds=_signature_holds,
    ),
    FuzzTarget(
        "prediction-request", _prediction_request, (InvalidRequest, LimitExceeded, SchemaMismatch),
        tuple(json.dumps(body).encode() for body in PREDICTION_REQUESTS), change_json, holds=_prediction_request_holds,
    ),
    FuzzTarget("backup", _unpacked, (BadBackup,), BACKUPS, change_bytes, holds=_backup_holds),
    FuzzTarget(
        "journal-entry", decode_entry, (InvalidRequest, ValueError),
        (encode_entry(request_record(1)), encode_entry(lifetime_record(1))), _change_entry, encode_entry, _entry_holds,
    ),
)  # fmt: skip
