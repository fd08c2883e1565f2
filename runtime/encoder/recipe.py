"""Read from a sentence-transformers directory how an encoder's output becomes an embedding. Pure.

A supported recipe is computed exactly. Other modules, poolings and values of the keys that are read are refused with
file and rule. Unknown keys are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import msgspec

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decoder
from runtime.models.pinned_files import PinnedFiles, json_object

MODULES: Final = "modules.json"
TRANSFORMER: Final = "sentence_bert_config.json"
SETTINGS: Final = "config_sentence_transformers.json"
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens"]
_POOLINGS: Final[Mapping[str, Pooling]] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}  # fmt: skip
# Before version 5 of the library, each pooling had a switch.
_SWITCHES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_PACKAGE: Final = "sentence_transformers."
_UNBOUNDED: Final = 1 << 24  # a tokenizer without a limit has a huge number instead
_OUTPUT: Final = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps after the encoder. `max_tokens` and `width` are None if the files don't state them."""

    pooling: Pooling
    normalize: bool
    max_tokens: int | None
    width: int | None


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str

    @property
    def name(self) -> str:
        """Return the class name if the class is the library's own, else ""."""
        return self.type.rpartition(".")[2] if self.type.startswith(_PACKAGE) else ""


def read_recipe(files: PinnedFiles) -> Recipe:
    """Return the recipe. Raises `Refused(ArtifactRejected)` with the file, module or key."""
    modules = _modules(files)
    names = [module.name for module in modules]
    for module in modules:
        if module.name not in ("Transformer", "Pooling", "Normalize"):
            _reject(MODULES, f"module '{module.type[:80]}' is not served: must be Transformer, Pooling or Normalize")
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        _reject(MODULES, f"{', '.join(names)}: must be Transformer, Pooling, and Normalize or nothing, in this order")
    if modules[0].path:
        _reject(MODULES, f"the Transformer lies in '{modules[0].path[:80]}': it must be at the top of the directory")
    _check_text_is_unchanged(files)
    pooling, width = _pooling(f"{modules[1].path}/config.json", files)
    return Recipe(pooling, len(modules) == 3, _max_tokens(files), width)


def _reject(path: str, rule: str) -> NoReturn:
    raise Refused(ArtifactRejected(path, rule))


def _modules(files: PinnedFiles) -> list[_Module]:
    if MODULES not in files:
        _reject(MODULES, "is missing")
    try:
        return decoder(list[_Module]).decode(files[MODULES])
    except BadJson as error:
        _reject(MODULES, f"is not a list of modules: {error}")


def _pooling(path: str, files: PinnedFiles) -> tuple[Pooling, int | None]:
    if path not in files:
        _reject(path[:80], "is missing")
    config = json_object(files, path)
    stated = config.get("pooling_mode")
    modes = [mode for key, mode in _SWITCHES.items() if config.get(key)] if stated is None else stated
    if isinstance(modes, list):
        modes = modes[0] if len(modes) == 1 else modes
    if not isinstance(modes, str) or modes not in _POOLINGS:
        _reject(path, f"pooling {str(modes)[:80]!r}: must be one of {', '.join(_POOLINGS)}")
    if config.get("include_prompt", True) is not True:
        _reject(path, "include_prompt must be true: prompts are not removed from the pooling")
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    return _POOLINGS[modes], width if type(width) is int else None


def _check_text_is_unchanged(files: PinnedFiles) -> None:
    settings, transformer = json_object(files, SETTINGS), json_object(files, TRANSFORMER)
    name = settings.get("default_prompt_name")
    if name is not None:
        _reject(SETTINGS, f"default_prompt_name={str(name)[:80]!r}: texts get no prompt here")
    for key, path, config, allowed in (
        ("truncate_dim", SETTINGS, settings, (None,)),
        ("model_type", SETTINGS, settings, (None, "SentenceTransformer")),
        ("do_lower_case", TRANSFORMER, transformer, (None, False)),
        ("transformer_task", TRANSFORMER, transformer, (None, "feature-extraction")),
        ("modality_config", TRANSFORMER, transformer, (None, _OUTPUT)),
        ("module_output_name", TRANSFORMER, transformer, (None, "token_embeddings")),
        ("unpad_inputs", TRANSFORMER, transformer, (None, False)),
    ):
        if config.get(key) not in allowed:
            _reject(path, f"{key}={str(config[key])[:80]!r} is not served")


def _max_tokens(files: PinnedFiles) -> int | None:
    """Return the shortest limit in the files. The library truncates longer texts; here they are refused."""
    stated: list[Any] = [
        json_object(files, TRANSFORMER).get("max_seq_length"),
        json_object(files, "tokenizer_config.json").get("model_max_length"),
    ]
    limits = [number for number in stated if type(number) is int and 0 < number < _UNBOUNDED]
    return min(limits, default=None)
