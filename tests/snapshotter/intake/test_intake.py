"""Headers and small files decide whether a model is accepted. Each refusal names the file and the reason."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec import structs

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy import intake
from snapshotter.intake.policy.intake import admit
from tests.snapshotter.models import (
    Model,
    default_config,
    default_tokenizer,
    default_weights,
    request_of,
    resharded,
    safetensors,
    weight,
)

INDEX = "model.safetensors.index.json"


def config(**more: object) -> dict[str, object]:
    return default_config() | more


def sharded(change: Callable[[dict[str, Any]], object] = lambda index: None) -> dict[str, bytes]:
    """Return a model of three shards with a changed index."""
    files = Model(shards=resharded(default_weights(), 3, seed=1)).files()
    index = json.loads(files[INDEX])
    change(index)
    return files | {INDEX: json.dumps(index).encode()}


def drop_first(index: dict[str, Any]) -> None:
    index["weight_map"].pop(min(index["weight_map"]))


def move_first(index: dict[str, Any]) -> None:
    placed = index["weight_map"]
    name = min(placed)
    placed[name] = next(path for path in sorted(set(placed.values())) if path != placed[name])


TWICE = {
    "model-1.safetensors": {"a": weight((4,), 1)},
    "model-2.safetensors": {"a": weight((4,), 1), "b": weight((4,), 2)},
}
DOUBLE_INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()

FILTERS = "kelvin-filters.json"
POLICY = b'{"format":1,"filters":[{"filter":"pii","input":{"US_SSN":"stop"}}]}'

REFUSALS = [
    pytest.param(Model(more={FILTERS: POLICY.replace(b"US_SSN", b"SSN")}).files(), FILTERS, "'SSN' is not known",
                 id="an unknown filter"),
    pytest.param(Model(more={FILTERS: b"[]"}).files(), FILTERS, "Expected `object`", id="filters that are a list"),
    pytest.param(Model(without=frozenset({"config.json"})).files(), "config.json", "is required", id="no config"),
    pytest.param(Model(without=frozenset({"tokenizer.json"})).files(), "tokenizer.json", "is required",
                 id="no tokenizer"),
    pytest.param(Model(without=frozenset({"model.safetensors"})).files(), "model.safetensors", "is required",
                 id="no weights"),
    pytest.param(Model(more={"pytorch_model.bin": b""}).files(), "pytorch_model.bin", "pickles can run code",
                 id="a pickle beside safetensors"),
    pytest.param(Model(more={"modeling_toy.py": b""}).files(), "modeling_toy.py", "code may not enter",
                 id="a python file"),
    pytest.param(Model(config=config(auto_map={"AutoModel": "x.Y"})).files(), "config.json", "auto_map",
                 id="a config that maps to code"),
    pytest.param(Model(config=config(text_config={"auto_map": {}})).files(), "config.json", "auto_map",
                 id="a nested config that maps to code"),
    pytest.param(Model(config=config(trust_remote_code=True)).files(), "config.json", "trust_remote_code",
                 id="a config that asks for trust"),
    pytest.param(Model(more={"tokenizer_config.json": b'{"auto_map": {}}'}).files(), "tokenizer_config.json",
                 "auto_map", id="a tokenizer's config that maps to code"),
    pytest.param(Model(more={"generation_config.json": b'{"a": 1, "a": 2}'}).files(), "generation_config.json",
                 "occurs twice", id="a key given twice"),
    pytest.param(Model(more={"generation_config.json": b"[]"}).files(), "generation_config.json",
                 "not a JSON object", id="a config that is a list"),
    pytest.param(Model(more={"chat_template.jinja": b"\xff"}).files(), "chat_template.jinja", "not UTF-8",
                 id="a template that is no text"),
    pytest.param(Model(more={"generation_config.json": b'{"a": "' + b"x" * (1 << 20) + b'"}'}).files(),
                 "generation_config.json", "the limit is", id="a small file that is large"),
    pytest.param(Model(config=config(eos_token_id=32)).files(), "config.json", "eos_token_id 32 is no row",
                 id="an end that is no row"),
    pytest.param(Model(more={"generation_config.json": b'{"bos_token_id": [1, -1]}'}).files(), "generation_config.json",
                 "bos_token_id -1 is no row", id="a beginning that is no row"),
    pytest.param(Model(tokenizer=default_tokenizer(33)).files(), "tokenizer.json", "do not belong together",
                 id="a tokenizer larger than the vocabulary"),
    pytest.param(Model(config=config(vocab_size=40), tokenizer=default_tokenizer(40)).files(), "tokenizer.json",
                 "the embedding has 32 rows", id="a tokenizer larger than the embedding's own shape"),
    pytest.param(Model(tokenizer={"model": {}}).files(), "tokenizer.json", "model.vocab is missing",
                 id="a tokenizer without a vocabulary"),
    pytest.param(Model(tokenizer={"model": {"vocab": {"a": -1}}}).files(), "tokenizer.json", "whole numbers",
                 id="a negative token id"),
    pytest.param(Model(tokenizer={"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": True}]}).files(),
                 "tokenizer.json", "whole numbers", id="a token id that is a boolean"),
    pytest.param(Model(config={"architectures": ["T"], "dtype": "float32"}).files(), "config.json",
                 "vocab_size must be", id="a config without a vocabulary size"),
    pytest.param(Model(config=config(dtype="float64")).files(), "config.json", "is not one of",
                 id="a dtype that is not computed in"),
    pytest.param(Model(shards=TWICE, more={INDEX: DOUBLE_INDEX}).files(), "model-2.safetensors",
                 "is in model-1.safetensors too", id="a tensor in two shards"),
    pytest.param(sharded(drop_first), INDEX, "into no file", id="a tensor that the index forgets"),
    pytest.param(sharded(move_first), INDEX, "but the headers have it in", id="a tensor that the index puts elsewhere"),
    pytest.param(sharded(lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors")), INDEX,
                 "have it in none", id="a tensor that only the index has"),
    pytest.param(sharded(lambda index: index.update(weight_map=[])), INDEX, "must map", id="an index of another shape"),
    pytest.param({path: raw for path, raw in sharded().items() if path != INDEX}, INDEX, "is required",
                 id="shards without an index"),
    pytest.param(Model(shards={"model.safetensors": {"config.json": weight((4,), 1)}}).files(), "config.json",
                 "the name of a pinned file", id="a tensor named as a pinned file"),
    pytest.param(Model(shards={"model.safetensors": {}}).files(), "model.safetensors", "1 to 200000 tensors",
                 id="a file without tensors"),
    pytest.param(Model(more={"vocab.json": b"{}"}).files(), "vocab.json", "not a file that a version pins",
                 id="a small file that is not served"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "path", "reason"), REFUSALS)
def test_invalid_directory_is_refused(files: dict[str, bytes], path: str, reason: str) -> None:
    """The first fault is reported with its file and reason."""
    with pytest.raises(Refused) as caught:
        admit(request_of(files))
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == path
    assert reason in failure.reason


def test_valid_directory_is_admitted() -> None:
    """The model on which every refusal above is based is accepted. Otherwise the table would prove nothing."""
    found = admit(Model().request())
    assert [file.path for file in found.files] == ["config.json", "generation_config.json", "tokenizer.json"]
    assert [tensor.name for tensor in found.tensors] == sorted(default_weights())
    assert found.dtype == "float32"
    assert found.highest_token_id == 31
    assert admit(request_of(sharded())).tensors


def test_left_out_weights_are_refused() -> None:
    """A client can't leave out weights that the directory has, nor name a pinned file as unread."""
    request = request_of(sharded())
    held_back = structs.replace(request, weights=request.weights[:-1], other_paths=(request.weights[-1].path,))
    with pytest.raises(Refused, match="the weights of this directory are"):
        admit(held_back)
    with pytest.raises(Refused, match="must be sent whole"):
        admit(structs.replace(request, other_paths=("special_tokens_map.json",)))


def test_auto_map_in_a_vocabulary_is_accepted() -> None:
    """A tokenizer may have the word auto_map, and a tensor may have it as its name."""
    tokenizer: dict[str, object] = {"model": {"vocab": {"auto_map": 0, "trust_remote_code": 1}}}
    weights = default_weights() | {"auto_map": weight((4,), 1)}
    admit(Model(tokenizer=tokenizer, shards=resharded(weights, 2, seed=1)).request())


@pytest.mark.parametrize(
    ("config", "dtypes", "want"),
    [
        pytest.param({"dtype": "bfloat16"}, ["F32"], "bfloat16", id="the config's dtype"),
        pytest.param({"torch_dtype": "float16"}, ["F32"], "float16", id="the older field"),
        pytest.param({"dtype": "torch.float16"}, ["F32"], "float16", id="written as the library prints it"),
        pytest.param({"dtype": None, "torch_dtype": "float16"}, ["F32"], "float16", id="null counts as missing"),
        pytest.param({"text_config": {"dtype": "float16"}}, ["F32"], "float16", id="the text part's dtype"),
        pytest.param({}, ["BF16", "F32", "I64"], "float32", id="else the dtype of most bytes"),
        pytest.param({}, ["BF16", "BF16", "BF16", "F32"], "bfloat16", id="most bytes, not the widest dtype"),
    ],
)
def test_compute_dtype(config: dict[str, object], dtypes: list[str], want: str) -> None:
    """The config's dtype is used, or else the dtype of most weight bytes."""
    weights = {f"t{number}": weight((4,), number, dtype) for number, dtype in enumerate(dtypes)}
    model = Model(config={"vocab_size": 32, **config}, shards={"model.safetensors": weights})
    assert admit(model.request()).dtype == want


def test_integer_weights_determine_no_dtype() -> None:
    """Integer weights alone determine no dtype."""
    model = Model(config={"vocab_size": 32}, shards={"model.safetensors": {"a": weight((4,), 1, "I64")}})
    with pytest.raises(Refused, match="names no dtype"):
        admit(model.request())


def test_headers_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total size of all headers is bounded."""
    monkeypatch.setattr(intake, "MAX_TOTAL_HEADER_BYTES", 100)
    with pytest.raises(Refused, match="headers of all files"):
        admit(Model().request())


@pytest.mark.parametrize("tensors", [["b", "a"], ["a", "b"]])
def test_order_of_files_does_not_matter(tensors: Iterable[str]) -> None:
    """The order of the directory listing does not matter."""
    weights = {name: weight((4,), ord(name)) for name in tensors}
    model = Model(shards={"model.safetensors": weights})
    files = model.files()
    back = dict(reversed(list(files.items())))
    assert admit(request_of(files)) == admit(request_of(back))
    assert safetensors(weights) in files.values()


def test_filters_are_pinned() -> None:
    """The filter policy is part of the version."""
    pinned = [{file.path: file.content for file in admit(request_of(Model(more=more).files())).files}
              for more in ({FILTERS: POLICY}, {})]  # fmt: skip
    assert pinned[0] == pinned[1] | {FILTERS: POLICY}
