"""Decide whether a directory may become a version, by its headers and small files, before any weights are sent.

Pure: raises `Refused(ArtifactRejected)` with the file and the reason. The gate decides whether the architecture can be
served; each chunk's bytes are verified when it is sent.
"""

from dataclasses import dataclass
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import POLICY_FILE as FILTERS
from kelvin.contracts.artifacts.filter_api import read_policy
from kelvin.contracts.artifacts.manifest import pad_to_page
from kelvin.contracts.artifacts.object_keys import TENSORS_SUFFIX
from kelvin.contracts.artifacts.push_api import PlanRequest, SmallFile, WeightsFile
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import (
    CONFIG,
    GENERATION,
    INDEX_FILE,
    MODULES,
    REQUIRED,
    TOKENIZER,
    FileRole,
    check_paths,
    choose_weights,
    is_predictor,
    max_bytes_of,
    role_of,
)
from snapshotter.intake.policy.kept_tensorizer import KeptTensorizer, check_kept_tensorizer
from snapshotter.intake.policy.model_config import (
    EngineDtype,
    check_special_ids,
    check_tokenizer_fits,
    compute_dtype,
    embedding_rows,
    find_code_request,
    highest_token_id,
)
from snapshotter.intake.policy.predictor_intake import admit_predictor
from snapshotter.intake.policy.safetensors_header import SourceTensor, parse_header
from snapshotter.intake.policy.strict_json import JsonObject, parse_object
from snapshotter.intake.policy.tensors_index import parse_index

MAX_TENSORS: Final = 200_000
MAX_TOTAL_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Intake:
    """An admitted push. `files` and `tensors` are in name order. A predictor has only files and a signature."""

    files: tuple[SmallFile, ...]
    tensors: tuple[SourceTensor, ...] = ()
    config_json: str = ""
    dtype: EngineDtype = "float32"
    highest_token_id: int = -1
    signature: Signature | None = None
    kept_tensorizer: KeptTensorizer | None = None  # the only weights file, if it is stored unchanged

    @property
    def total_bytes(self) -> int:
        """Return the bytes that `lay_out` needs: each file and tensor takes whole pages."""
        files = sum(pad_to_page(len(file.content)) for file in self.files)
        return files + sum(pad_to_page(tensor.nbytes) for tensor in self.tensors)


def admit(request: PlanRequest) -> Intake:
    """Judge a push by its paths, then small files, then headers. The first fault wins."""
    small, weights = [file.path for file in request.small_files], [file.path for file in request.weights]
    check_paths([*small, *weights, *request.other_paths])
    if is_predictor([*small, *weights, *request.other_paths]):
        if FILTERS in (*small, *request.other_paths):
            raise Refused(ArtifactRejected(FILTERS, "filters are for models that generate text"))
        found = admit_predictor(request)
        return Intake(files=found.files, signature=found.signature)
    parsed = _read_small_files(request.small_files)
    indexed = _read_index(parsed.pop(INDEX_FILE)) if INDEX_FILE in parsed else None
    _check_sent_weights(request, indexed)
    tensors = _read_headers(request.weights)
    if indexed is not None:
        _check_index(indexed, tensors)
    clashing_names = {tensor.name for tensor in tensors} & parsed.keys()
    if clashing_names:
        raise Refused(ArtifactRejected(min(clashing_names), "a tensor has the name of a pinned file"))
    highest_id = highest_token_id(parsed[TOKENIZER])
    rows = embedding_rows(parsed[CONFIG], tensors)
    check_tokenizer_fits(highest_id, rows)
    for path in (CONFIG, GENERATION):
        check_special_ids(path, parsed.get(path, {}), rows)
    pinned = sorted((file for file in request.small_files if file.path != INDEX_FILE), key=lambda file: file.path)
    return Intake(
        files=tuple(pinned),
        tensors=tensors,
        config_json=next(file.content for file in pinned if file.path == CONFIG).decode(),
        dtype=compute_dtype(parsed[CONFIG], tensors),
        highest_token_id=highest_id,
        kept_tensorizer=_kept_tensorizer(request.weights[0]),
    )


def _read_small_files(files: tuple[SmallFile, ...]) -> dict[str, JsonObject]:
    """Return each small file's object by path; empty for a template, which is text, and for a list."""
    parsed: dict[str, JsonObject] = {}
    for file in files:
        if role_of(file.path) not in (FileRole.PINNED, FileRole.INDEX):
            raise Refused(ArtifactRejected(file.path, "it is not a file that a version pins"))
        limit = max_bytes_of(file.path)
        if len(file.content) > limit:
            raise Refused(ArtifactRejected(file.path, f"it has {len(file.content)} bytes; the limit is {limit}"))
        if file.path == FILTERS:
            read_policy(file.content)
        if file.path.endswith(".json") and file.path != MODULES:  # MODULES is a list, which the gate reads
            parsed[file.path] = _read_json(file)
        else:
            parsed[file.path] = {}
            _check_text(file)
    for path in REQUIRED:
        if path not in parsed:
            raise Refused(ArtifactRejected(path, "it is required"))
    return parsed


def _read_json(file: SmallFile) -> JsonObject:
    found = parse_object(file.content, file.path)
    # Vocabularies and tensor names may hold any word without naming code.
    if file.path not in (TOKENIZER, INDEX_FILE) and (wish := find_code_request(found)) is not None:
        raise Refused(
            ArtifactRejected(file.path, f"'{wish}' asks for code from the model's directory: {FileRole.CODE.value}")
        )
    return found


def _check_text(file: SmallFile) -> None:
    try:
        file.content.decode()
    except UnicodeDecodeError as error:
        raise Refused(ArtifactRejected(file.path, f"it is not UTF-8 (byte {error.start})")) from None


def _read_index(index: JsonObject) -> dict[str, str]:
    found = index.get("weight_map")
    if isinstance(found, dict):
        pairs = {name: path for name, path in found.items() if isinstance(path, str)}
        if pairs and len(pairs) == len(found):
            return pairs
    raise Refused(ArtifactRejected(INDEX_FILE, "weight_map must map tensor names to files"))


def indexed_files(index: bytes) -> frozenset[str]:
    """Return the files that an index names, by which a client chooses what it sends. Raises as `admit` does."""
    return frozenset(_read_index(parse_object(index, INDEX_FILE)).values())


def _check_sent_weights(request: PlanRequest, indexed: dict[str, str] | None) -> None:
    """Check that exactly the directory's weights were sent."""
    sent = {file.path for file in request.weights}
    if any(path.endswith(TENSORS_SUFFIX) for path in sent):
        _check_tensorizer_push(request, sent)
        return
    candidates = sent | {path for path in request.other_paths if role_of(path) is FileRole.WEIGHTS}
    chosen = choose_weights(candidates, None if indexed is None else frozenset(indexed.values()))
    if sent != set(chosen):
        wrong_path = min(sent.symmetric_difference(chosen))
        raise Refused(ArtifactRejected(wrong_path, f"the weights of this directory are {', '.join(chosen[:5])}"))
    left_out = {path for path in request.other_paths if role_of(path) in (FileRole.PINNED, FileRole.INDEX)}
    if left_out:
        raise Refused(ArtifactRejected(min(left_out), "it must be sent whole"))


def _check_tensorizer_push(request: PlanRequest, sent: set[str]) -> None:
    """Check a tensorizer push. Its client names the file, which contains all weights."""
    if len(sent) > 1 or (path := next(iter(sent))).count("/"):
        rule = "a tensorizer file is pushed alone, without other weights"
        raise Refused(ArtifactRejected(min(sent), rule))
    if INDEX_FILE in {file.path for file in request.small_files}:
        raise Refused(ArtifactRejected(INDEX_FILE, f"it does not apply to {path}"))


def _read_headers(weights: tuple[WeightsFile, ...]) -> tuple[SourceTensor, ...]:
    between = (file.whole.between for file in weights if file.whole is not None)
    if sum(len(file.header) for file in weights) + sum(map(len, between)) > MAX_TOTAL_HEADER_BYTES:
        rule = f"the headers of all files have more than {MAX_TOTAL_HEADER_BYTES} bytes"
        raise Refused(ArtifactRejected(weights[0].path, rule))
    tensor_by_name: dict[str, SourceTensor] = {}
    for file in sorted(weights, key=lambda file: file.path):
        for tensor in _read_header(file):
            if (duplicate := tensor_by_name.get(tensor.name)) is not None:
                raise Refused(ArtifactRejected(file.path, f"tensor {tensor.name[:80]!r} is in {duplicate.path} too"))
            tensor_by_name[tensor.name] = tensor
    if not 0 < len(tensor_by_name) <= MAX_TENSORS:
        rule = f"a model has 1 to {MAX_TENSORS} tensors, not {len(tensor_by_name)}"
        raise Refused(ArtifactRejected(weights[0].path, rule))
    return tuple(tensor_by_name[name] for name in sorted(tensor_by_name))


def _read_header(file: WeightsFile) -> tuple[SourceTensor, ...]:
    if file.path.endswith(TENSORS_SUFFIX):
        return tuple(entry.tensor for entry in parse_index(file.path, file.header, file.size))
    return parse_header(file.path, file.header, file.size)


def _kept_tensorizer(file: WeightsFile) -> KeptTensorizer | None:
    if file.whole is None:
        return None
    if not file.path.endswith(TENSORS_SUFFIX):
        raise Refused(ArtifactRejected(file.path, "only a tensorizer file is stored unchanged"))
    return check_kept_tensorizer(file, file.whole, parse_index(file.path, file.header, file.size))


def _check_index(indexed: dict[str, str], tensors: tuple[SourceTensor, ...]) -> None:
    """Check that index and headers name the same tensors in the same files, each once."""
    path_by_name = {tensor.name: tensor.path for tensor in tensors}
    differing = set(indexed.items()) ^ set(path_by_name.items())
    if differing:
        name = min(name for name, _ in differing)
        stated_path, actual_path = indexed.get(name, "no file"), path_by_name.get(name, "none")
        rule = f"it puts tensor {name[:80]!r} into {stated_path[:80]}, but the headers have it in {actual_path}"
        raise Refused(ArtifactRejected(INDEX_FILE, rule))
