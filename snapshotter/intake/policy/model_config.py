"""Read the facts of config.json and tokenizer.json that decide whether a push may enter. The gate judges the rest."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import CONFIG, TOKENIZER
from snapshotter.intake.policy.safetensors_header import SourceTensor
from snapshotter.intake.policy.strict_json import JsonObject, as_count

EngineDtype = Literal["float32", "bfloat16", "float16"]
_ENGINE_DTYPES: Final[dict[str, EngineDtype]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SERVED_DTYPES: Final = frozenset(_ENGINE_DTYPES.values())
# The library's names of embedding tables. An additional check: the config's own number is always checked.
_EMBEDDING_NAMES: Final = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def find_code_request(value: object) -> str | None:
    """Return the key by which a config asks for code from the model's directory, at any depth, or None."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as found:
                if "auto_map" in found:
                    return "auto_map"
                if found.get("trust_remote_code"):
                    return "trust_remote_code"
                pending += found.values()
            case list() as items:
                pending += items
    return None


def compute_dtype(config: JsonObject, tensors: Iterable[SourceTensor]) -> EngineDtype:
    """Return the config's `dtype` (or older `torch_dtype`), or else the float type of most of the weights' bytes.

    Raises `Refused(ArtifactRejected)` if that dtype is not served.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (stated := part.get("dtype") or part.get("torch_dtype")):
            name = stated.removeprefix("torch.") if isinstance(stated, str) else ""
            if name not in _SERVED_DTYPES:
                rule = f"dtype {str(stated)[:20]!r} is not one of {', '.join(sorted(_SERVED_DTYPES))}"
                raise Refused(ArtifactRejected(CONFIG, rule))
            return name
    bytes_by_dtype: Counter[EngineDtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in _ENGINE_DTYPES:
            bytes_by_dtype[_ENGINE_DTYPES[tensor.dtype]] += tensor.nbytes
    if not bytes_by_dtype:
        rule = f"it names no dtype, and no tensor is one of {', '.join(_ENGINE_DTYPES)}"
        raise Refused(ArtifactRejected(CONFIG, rule))
    return max(sorted(bytes_by_dtype), key=lambda name: bytes_by_dtype[name])


def embedding_rows(config: JsonObject, tensors: Iterable[SourceTensor]) -> int:
    """Return the number of rows that token ids may index: `vocab_size`, or fewer if the embedding's shape has fewer.

    Raises `Refused(ArtifactRejected)` without a vocab_size.
    """
    inner = config.get("text_config")
    sizes = [as_count(part.get("vocab_size")) for part in (config, inner) if isinstance(part, dict)]
    rows = next((size for size in sizes if size), None)
    if rows is None:
        raise Refused(ArtifactRejected(CONFIG, "vocab_size must be a whole number of 1 or more"))
    shapes = [tensor.shape for tensor in tensors if tensor.name.endswith(_EMBEDDING_NAMES) and len(tensor.shape) == 2]
    # Some models also have small side tables (positions, layers). The largest table is the vocabulary's.
    return min(rows, max((shape[0] for shape in shapes), default=rows))


def highest_token_id(tokenizer: JsonObject) -> int:
    """Return the largest id that the tokenizer can produce. Raises `Refused(ArtifactRejected)` without a vocabulary."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    match vocabulary:
        case dict():
            ids = [as_count(number) for number in vocabulary.values()]
        case list():  # Unigram: an entry's index is its id
            ids = list(range(len(vocabulary)))
        case _:
            raise Refused(ArtifactRejected(TOKENIZER, "model.vocab is missing"))
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise Refused(ArtifactRejected(TOKENIZER, "added_tokens must be a list"))
    ids += [as_count(entry.get("id")) if isinstance(entry, dict) else None for entry in added]
    counts = [number for number in ids if number is not None]
    if not counts or len(counts) != len(ids):
        raise Refused(ArtifactRejected(TOKENIZER, "token ids must be whole numbers of 0 or more"))
    return max(counts)


def check_special_ids(path: str, config: JsonObject, rows: int) -> None:
    """Check that `bos_token_id` and `eos_token_id` are rows of the embedding. Raises `Refused(ArtifactRejected)`."""
    for key in ("bos_token_id", "eos_token_id"):
        value = config.get(key)
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and not 0 <= token_id < rows:
                raise Refused(ArtifactRejected(path, f"{key} {token_id} is no row of the embedding, which has {rows}"))


def check_tokenizer_fits(highest: int, rows: int) -> None:
    """Check that every token id has an embedding row. Raises `Refused(ArtifactRejected)`."""
    if highest >= rows:
        rule = f"its highest token id is {highest}, but the embedding has {rows} rows: they do not belong together"
        raise Refused(ArtifactRejected(TOKENIZER, rule))
