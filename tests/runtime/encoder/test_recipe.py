"""A sentence-transformers directory is computed exactly, or refused with file and rule."""

import json
from typing import Any

import pytest

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.runtime_control import GateJob
from kelvin.contracts.errors import Refused
from runtime.encoder.recipe import Recipe, read_recipe
from runtime.lifecycle.sealing_jobs import gate
from tests.runtime.encoder.models import FAMILIES, PACKAGE, tiny

NEWER = "sentence_transformers.base.modules"


def with_changes(changes: dict[str, Any]) -> dict[str, bytes]:
    """Return the tiny model's files with some replaced (by an object) or removed (None)."""
    files = dict(tiny().files)
    for path, content in changes.items():
        files.pop(path, None)
        if content is not None:
            files[path] = content if isinstance(content, bytes) else json.dumps(content).encode()
    return files


def modules(*types: str, first: str = "") -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": f"{at}_{kind.rpartition('.')[2]}" if at else first, "type": kind}
        for at, kind in enumerate(types)
    ]


BASIC = (f"{PACKAGE}.Transformer", f"{PACKAGE}.Pooling")
NEW = {
    "modules.json": modules(
        f"{NEWER}.transformer.Transformer", "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        f"{NEWER}.normalize.Normalize",
    ),
    "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "max", "include_prompt": True},
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    },
    "config_sentence_transformers.json": {
        "default_prompt_name": None, "model_type": "SentenceTransformer", "prompts": {"query": ""},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({}, Recipe("mean", True, 64, 32), id="as version 2 wrote it"),
        pytest.param(NEW, Recipe("max", True, 64, 32), id="as version 6 writes it"),
        pytest.param({"modules.json": modules(*BASIC)}, Recipe("mean", False, 64, 32), id="without Normalize"),
        pytest.param(
            {"sentence_bert_config.json": {"max_seq_length": 16}}, Recipe("mean", True, 16, 32), id="a shorter limit"
        ),
        pytest.param(
            {"sentence_bert_config.json": None, "tokenizer_config.json": {"model_max_length": 10**30}},
            Recipe("mean", True, None, 32),
            id="no limit",
        ),
    ],
)
def test_read(changes: dict[str, Any], want: Recipe) -> None:
    assert read_recipe(with_changes(changes)) == want


@pytest.mark.parametrize(
    ("changes", "path", "rule"),
    [
        pytest.param({"modules.json": None}, "modules.json", "is missing", id="no modules"),
        pytest.param({"modules.json": b"{}"}, "modules.json", "is not a list of modules", id="no list"),
        pytest.param(
            {"modules.json": modules(*BASIC, f"{PACKAGE}.Dense")},
            "modules.json", "module 'sentence_transformers.models.Dense' is not served", id="a module not served",
        ),
        pytest.param(
            {"modules.json": modules("own.code.Transformer", BASIC[1])},
            "modules.json", "module 'own.code.Transformer' is not served", id="a module of its own code",
        ),
        pytest.param(
            {"modules.json": modules(BASIC[0], f"{PACKAGE}.Normalize", BASIC[1])},
            "modules.json", "in this order", id="another order",
        ),
        pytest.param(
            {"modules.json": modules(*BASIC, first="0_Transformer")},
            "modules.json", "must be at the top", id="a transformer elsewhere",
        ),
        pytest.param({"1_Pooling/config.json": None}, "1_Pooling/config.json", "is missing", id="no pooling config"),
        pytest.param(
            {"1_Pooling/config.json": {"pooling_mode": "weightedmean"}},
            "1_Pooling/config.json", "pooling 'weightedmean': must be one of cls", id="a pooling not served",
        ),
        pytest.param(
            {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}},
            "1_Pooling/config.json", "must be one of", id="two at once",
        ),
        pytest.param(
            {"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            "1_Pooling/config.json", "include_prompt", id="prompts left out",
        ),
        pytest.param(
            {"config_sentence_transformers.json": {"default_prompt_name": "query", "prompts": {"query": "q: "}}},
            "config_sentence_transformers.json", "default_prompt_name='query'", id="a prompt before each text",
        ),
        pytest.param(
            {"config_sentence_transformers.json": {"truncate_dim": 16}},
            "config_sentence_transformers.json", "truncate_dim='16'", id="dimensions cut off",
        ),
        pytest.param(
            {"sentence_bert_config.json": {"do_lower_case": True}},
            "sentence_bert_config.json", "do_lower_case='True'", id="texts made lower case",
        ),
        pytest.param(
            {"1_Pooling/config.json": {"pooling_mode": "mean", "embedding_dimension": 33}},
            "modules.json", "the pooling takes 33 dimensions, the encoder gives 32", id="a pooling of another width",
        ),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], path: str, rule: str) -> None:
    """A directory that can't be computed is refused at the gate, with its file and the rule."""
    recipe = {name: content.decode() for name, content in with_changes(changes).items()}
    job = GateJob(config_json=tiny().job.config_json, tensors=tiny().job.tensors, recipe=recipe)
    with pytest.raises(Refused) as caught:
        gate(job)
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == path
    assert rule in failure.reason


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"architectures": ["LlamaForCausalLM"]}, "must be one of BertModel", id="a decoder"),
        pytest.param({"is_decoder": True}, "'is_decoder'", id="an encoder as a decoder"),
        pytest.param({"position_embedding_type": "relative_key"}, "must be 'absolute'", id="relative positions"),
        pytest.param({"quantization_config": {"bits": 8}}, "is quantised", id="quantised"),
        pytest.param({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000", id="too many layers"),
    ],
)
def test_refused_by_config(changes: dict[str, Any], rule: str) -> None:
    config = {**json.loads(tiny().job.config_json), **changes}
    job = GateJob(config_json=json.dumps(config), tensors=tiny().job.tensors, recipe=tiny().job.recipe)
    with pytest.raises(Refused, match=rule):
        gate(job)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(family: str) -> None:
    """The facts have architecture, width and length, and name each stored tensor once."""
    facts = tiny(family).facts()
    assert (facts.architecture, facts.kind, facts.dimensions) == (FAMILIES[family], "embed", 32)
    assert (facts.max_positions, facts.kv_bytes_per_token, facts.vocab_size) == (64, 0, 64)
    assert sorted(facts.first_use) == sorted(tiny(family).tensors)
    assert facts.first_use[0].endswith("word_embeddings.weight")


def test_an_encoder_without_a_recipe_is_not_served() -> None:
    """A decoder directory of an encoder says nothing about how its output becomes a vector."""
    with pytest.raises(Refused, match="must be one of Gemma3ForCausalLM"):
        gate(GateJob(config_json=tiny().job.config_json, tensors=tiny().job.tensors))


def test_position_ids_of_older_checkpoints_are_left_alone() -> None:
    """The library computes position ids itself, so stored ones are neither used nor required."""
    tensors = {**tiny().job.tensors, "embeddings.position_ids": ("I64", (1, 72))}
    facts = gate(GateJob(config_json=tiny().job.config_json, tensors=tensors, recipe=tiny().job.recipe))
    assert "embeddings.position_ids" not in facts.first_use
