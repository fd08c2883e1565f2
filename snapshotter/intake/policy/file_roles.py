"""What a file of a pushed directory is, by its path: served, ignored or refused. Its content is intake's question."""

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
# What sentence-transformers writes beside an encoder: which modules follow it, and how they are set.
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
# A directory that predicts: the graph with its weights, and what it can't say of its tensors.
ONNX_FILE: Final = "model.onnx"
SIGNATURE_FILE: Final = "signature.json"
PREDICTOR: Final = frozenset({ONNX_FILE, SIGNATURE_FILE})
MAX_PATH_BYTES: Final = 512
MAX_PATHS: Final = 10_000
MAX_WEIGHTS_FILES: Final = 1_000
_SMALL_BYTES: Final = 1 << 20
_LARGER: Final = {TOKENIZER: 64 << 20, "tokenizer_config.json": 8 << 20, INDEX_FILE: 32 << 20, ONNX_FILE: 32 << 20}

# Formats whose ordinary reader runs what the file says. Keras files may hold lambdas, archives may hold anything.
_PICKLES: Final = (
    ".bin", ".pt", ".pth", ".pt2", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".mar", ".nemo",
    ".h5", ".keras",
)  # fmt: skip
_CODE: Final = (".py", ".pyc", ".pyo", ".pyd", ".so", ".dylib", ".dll", ".exe")
_MODULE_CONFIG: Final = re.compile(r"[0-9]+_[A-Za-z]+/config\.json")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\\]")


class FileRole(Enum):
    """What becomes of a file."""

    PINNED = "pinned into the version"
    WEIGHTS = "weights"
    INDEX = "the index of sharded weights: checked, not kept"
    IGNORED = "neither served nor dangerous: listed and left out"
    PICKLE = "pickles can run code when loaded; convert the weights to safetensors"
    CODE = "code may not enter with a model; only architectures of the installed library are served"


def find_path_fault(path: str) -> str | None:
    """Which rule of path shape is broken, in words: relative, no way out, nothing that reads differently elsewhere."""
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
    """Return the role of a file by its path. Pickles and code are recognised in any directory and in any case of
    letters. Other names must match exactly. Only files at the top are served, and the configs of modules.
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
    """Whether a directory of these is an ONNX model; beside safetensors such a file is another form of the same."""
    there = set(paths)
    return ONNX_FILE in there and not any(role_of(path) is FileRole.WEIGHTS for path in there)


def is_recipe_file(path: str) -> bool:
    """Whether the file says how an embedding is made: the modules, their configs, and how long a text may be."""
    return path in RECIPE or path == "tokenizer_config.json" or _MODULE_CONFIG.fullmatch(path) is not None


def max_bytes_of(path: str) -> int:
    """How large a small file may be."""
    return _LARGER.get(path, _SMALL_BYTES)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse the first path (in order of names) that may not enter. Raises `Refused(ArtifactRejected)`."""
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
    """Which safetensors files of the top are the model: those that the index names, or the only one, in name order.

    `indexed` is None without an index file. Others beside an index are left out, as the library does.
    Raises `Refused(ArtifactRejected)` where the choice is not clear.
    """
    there = sorted(candidates)
    if indexed is None:
        if not there:
            raise Refused(ArtifactRejected(SINGLE_FILE, "it is required: there are no safetensors weights"))
        if len(there) > 1:
            raise Refused(ArtifactRejected(INDEX_FILE, f"it is required: there are {len(there)} safetensors files"))
        return tuple(there)
    for path in sorted(indexed):
        if path not in there:
            raise Refused(ArtifactRejected(INDEX_FILE, f"it names {path[:80]!r}, which is not there"))
    if SINGLE_FILE in there and SINGLE_FILE not in indexed:
        raise Refused(ArtifactRejected(SINGLE_FILE, f"it stands beside {INDEX_FILE}, which does not name it"))
    if not 0 < len(indexed) <= MAX_WEIGHTS_FILES:
        raise Refused(ArtifactRejected(INDEX_FILE, f"it must name 1 to {MAX_WEIGHTS_FILES} files"))
    return tuple(sorted(indexed))
