"""Read the small JSON files pinned in a version, for all parts of the runtime that need them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decode_lenient

CONFIG: Final = "config.json"
PinnedFiles = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling values for requests that state none. `top_k` 0 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def json_object(files: PinnedFiles, name: str) -> dict[str, Any]:
    """Return a file's JSON object, empty if the file is absent. Raises `Refused(ArtifactRejected)`."""
    if name not in files:
        return {}
    try:
        value = decode_lenient(files[name])
    except BadJson as error:
        raise Refused(ArtifactRejected(name, "is not JSON")) from error
    if not isinstance(value, dict):
        raise Refused(ArtifactRejected(name, "is not a JSON object"))
    return value


def end_of_sequence_ids(files: PinnedFiles) -> frozenset[int]:
    """Return the end-of-sequence ids of both configurations, because the files of one checkpoint may disagree."""
    ids: set[int] = set()
    for name in (CONFIG, "generation_config.json"):
        value = json_object(files, name).get("eos_token_id")
        ids.update(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
    return frozenset(ids)


def sampling_defaults(files: PinnedFiles) -> SamplingDefaults:
    """Return the defaults of `generation_config.json` if it samples. Values outside OpenAI's ranges are ignored."""
    config = json_object(files, "generation_config.json")
    if config.get("do_sample") is not True:
        return SamplingDefaults()
    top_k = config.get("top_k")
    return SamplingDefaults(
        temperature=_number_within(config.get("temperature"), 0.0, 2.0, default=1.0),
        top_p=_number_within(config.get("top_p"), 0.0, 1.0, default=1.0),
        top_k=top_k if type(top_k) is int and top_k > 0 else 0,
    )


def _number_within(value: object, low: float, high: float, *, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return float(value) if low <= value <= high else default
