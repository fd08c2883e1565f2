"""Decide by its path whether a pushed file is served, ignored or refused. `intake.py` judges its content."""

import re
from collections.abc import Iterable
from enum import Enum
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import POLICY_FILE as FILTERS
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.strict_json import is_text

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
GENERATION: Final = "generation_config.json"
INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
REQUIRED: Final = (CONFIG, TOKENIZER)
MODULES: Final = "modules.json"
# Files of sentence-transformers with the modules that follow an encoder, and their settings.
RECIPE: Final = frozenset({MODULES, "sentence_bert_config.json", "config_sentence_transformers.json"})
PINNED: Final = RECIPE | frozenset(
    {
        CONFIG,
        TOKENIZER,
        "tokenizer_config.json",
        GENERATION,
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "chat_template.jinja",
        FILTERS,
    }
)
# The files of a predictor: the graph with its weights, and the facts about tensors that a graph can't express.
ONNX_FILE: Final = "model.onnx"
SIGNATURE_FILE: Final = "signature.json"
PREDICTOR: Final = frozenset({ONNX_FILE, SIGNATURE_FILE})
MAX_PATH_BYTES: Final = 512
MAX_PATHS: Final = 10_000
MAX_WEIGHTS_FILES: Final = 1_000
_SMALL_BYTES: Final = 1 << 20
_LARGER: Final = {TOKENIZER: 64 << 20, "tokenizer_config.json": 8 << 20, INDEX_FILE: 32 << 20, ONNX_FILE: 32 << 20}

# Formats whose usual reader runs code from the file. Keras files may hold lambdas, archives may hold anything.
_PICKLES: Final = (
    ".bin", ".pt", ".pth", ".pt2", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".mar", ".nemo",
    ".h5", ".keras",
)  # fmt: skip
_CODE: Final = (".py", ".pyc", ".pyo", ".pyd", ".so", ".dylib", ".dll", ".exe")
_MODULE_CONFIG: Final = re.compile(r"[0-9]+_[A-Za-z]+/config\.json")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\\]")


class FileRole(Enum):
    """The role of a pushed file. The value is the text for users."""

    PINNED = "pinned into the version"
    WEIGHTS = "weights"
    INDEX = "the index of sharded weights: checked, not kept"
    IGNORED = "neither served nor dangerous: listed and left out"
    PICKLE = "pickles can run code when loaded; convert the weights to safetensors"
    CODE = "code may not enter with a model; only architectures of the installed library are served"


def find_path_fault(path: str) -> str | None:
    """Return the broken rule in words, or None. A path is relative, stays inside, and is unambiguous everywhere."""
    if not is_text(path) or not 0 < len(path.encode()) <= MAX_PATH_BYTES:
        return f"a path has 1 to {MAX_PATH_BYTES} bytes of UTF-8"
    if _CONTROL.search(path):
        return "a path may not hold backslashes or control characters"
    if path.startswith("/"):
        return "a path must be relative to the pushed directory"
    if any(segment in ("", ".", "..") for segment in path.split("/")):
        return "a path may not hold empty segments, '.' or '..'"
    return None


def role_of(path: str) -> FileRole:
    """Return the role of a file by its path. Pickles and code are recognised in any directory and in any letter case.
    Other names must match exactly. Only files at the top are served, and the configs of modules.
    """
    lowered = path.lower()
    if lowered.endswith(_PICKLES):
        return FileRole.PICKLE
    if lowered.endswith(_CODE):
        return FileRole.CODE
    if path in PINNED or _MODULE_CONFIG.fullmatch(path):
        return FileRole.PINNED
    if path == INDEX_FILE:
        return FileRole.INDEX
    if path.endswith(".safetensors") and "/" not in path:
        return FileRole.WEIGHTS
    return FileRole.IGNORED


def is_predictor(paths: Iterable[str]) -> bool:
    """Return whether these paths are an ONNX model. Next to safetensors, `model.onnx` is only another format."""
    names = set(paths)
    return ONNX_FILE in names and not any(role_of(path) is FileRole.WEIGHTS for path in names)


def is_recipe_file(path: str) -> bool:
    """Return whether the file describes how an embedding is made: modules, their configs, or the length of a text."""
    return path in RECIPE or path == "tokenizer_config.json" or _MODULE_CONFIG.fullmatch(path) is not None


def max_bytes_of(path: str) -> int:
    """Return how many bytes a small file may have."""
    return _LARGER.get(path, _SMALL_BYTES)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse the first path, in name order, that is not allowed. Raises `Refused(ArtifactRejected)`."""
    seen: set[str] = set()
    for path in sorted(paths):
        if (fault := find_path_fault(path)) is not None:
            raise Refused(ArtifactRejected(repr(path[:80]), fault))
        if path in seen:
            raise Refused(ArtifactRejected(path, "it is named twice"))
        if len(seen) >= MAX_PATHS:
            raise Refused(ArtifactRejected(path, f"a directory may hold at most {MAX_PATHS} files"))
        seen.add(path)
        if (role := role_of(path)) in (FileRole.PICKLE, FileRole.CODE):
            raise Refused(ArtifactRejected(path, role.value))


def choose_weights(candidates: Iterable[str], indexed: frozenset[str] | None) -> tuple[str, ...]:
    """Return the safetensors files at the top that are the model, in name order: those of the index, or the only one.

    `indexed` is None without an index file. Files that an index doesn't name are left out, as in the library. Raises
    `Refused(ArtifactRejected)` if the choice is not clear.
    """
    present = sorted(candidates)
    if indexed is None:
        if not present:
            raise Refused(ArtifactRejected(SINGLE_FILE, "it is required: there are no safetensors weights"))
        if len(present) > 1:
            raise Refused(ArtifactRejected(INDEX_FILE, f"it is required: there are {len(present)} safetensors files"))
        return tuple(present)
    for path in sorted(indexed):
        if path not in present:
            raise Refused(ArtifactRejected(INDEX_FILE, f"it names {path[:80]!r}, which is missing"))
    if SINGLE_FILE in present and SINGLE_FILE not in indexed:
        raise Refused(ArtifactRejected(SINGLE_FILE, f"it is next to {INDEX_FILE}, which does not name it"))
    if not 0 < len(indexed) <= MAX_WEIGHTS_FILES:
        raise Refused(ArtifactRejected(INDEX_FILE, f"it must name 1 to {MAX_WEIGHTS_FILES} files"))
    return tuple(sorted(indexed))
