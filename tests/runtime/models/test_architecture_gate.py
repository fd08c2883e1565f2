"""Models that this engine would compute wrongly are refused by name and rule, from config and headers alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.runtime_control import GateJob
from kelvin.contracts.errors import Refused
from runtime.models import architecture_gate
from runtime.models.architecture_gate import check_architecture
from runtime.models.families import DECODERS, Family
from tests.runtime.tiny_decoders import CONFIGS, TinyModel, tiny

CONFIG = "config.json"


def job(changes: dict[str, Any], name: str = "llama", model: TinyModel | None = None) -> GateJob:
    """Return a tiny model's job with changes to its config."""
    model = model or tiny(name)
    values = {**json.loads(model.config_json), **changes}
    return GateJob(config_json=json.dumps(values), tensors=model.job.tensors)


def rejection(of: GateJob) -> ArtifactRejected:
    with pytest.raises(Refused) as caught:
        check_architecture(of)
    assert isinstance(caught.value.failure, ArtifactRejected)
    return caught.value.failure


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_facts(name: str, dtype: torch.dtype, size: int) -> None:
    """The facts have the KV cache's shape, vocabulary and positions, without reading a weight."""
    facts = check_architecture(tiny(name, dtype).job)
    assert facts.architecture == CONFIGS[name]["architectures"][0]
    assert facts.dtype == str(dtype).removeprefix("torch.")
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.value_dim) == (3, 2, 8, 8)
    assert (facts.vocab_size, facts.max_positions) == (97, 512)
    assert facts.kv_bytes_per_token == 3 * 2 * (8 + 8) * size


def test_first_use_is_the_order_of_a_forward() -> None:
    """Tensors are in the order of a forward, each stored one once."""
    facts = check_architecture(tiny("llama").job)
    layer = [
        "input_layernorm.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "post_attention_layernorm.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]
    layers = [f"model.layers.{index}.{name}" for index in range(3) for name in layer]
    assert facts.first_use == ("model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight")


def test_first_use_of_a_tied_head() -> None:
    """A tied head is not listed, and biases follow their weights."""
    facts = check_architecture(tiny("qwen2").job)
    assert set(facts.first_use) == set(tiny("qwen2").tensors)
    assert facts.first_use[-1] == "model.norm.weight"
    where = facts.first_use.index("model.layers.0.self_attn.q_proj.weight")
    assert facts.first_use[where + 1] == "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param(
            {"architectures": ["GPT2LMHeadModel"]},
            "must be one of Gemma3ForCausalLM, Llama",
            id="an architecture not served",
        ),
        pytest.param({"architectures": None}, "must be one of Gemma3", id="no architecture"),
        pytest.param({"architectures": ["LlamaForCausalLM"] * 2}, "must be one of Gemma3", id="two architectures"),
        pytest.param({"model_type": "qwen2"}, "must be 'llama'", id="a model type of another family"),
        pytest.param({"auto_map": {"AutoModel": "m.M"}}, "'auto_map': names its own code", id="code of its own"),
        pytest.param({"trust_remote_code": True}, "'trust_remote_code'", id="trust in remote code"),
        pytest.param({"quantization_config": {"bits": 4}}, "is quantised", id="quantised"),
        pytest.param({"fusion_config": {"x": True}}, "'fusion_config'", id="fused modules"),
        pytest.param({"attention_chunk_size": 8}, "chunked attention", id="chunked attention"),
        pytest.param({"output_attentions": True}, "'output_attentions'", id="attentions handed out"),
        pytest.param(
            {"use_bidirectional_attention": True}, "attends to later tokens", id="attention in both directions"
        ),
        pytest.param({"output_router_logits": True}, "'output_router_logits'", id="router logits handed out"),
        pytest.param({"dtype": "float64"}, "dtype='float64': must be one of bfloat16", id="a dtype not computed"),
        pytest.param({"dtype": 5}, "dtype=5: must be one of", id="a dtype that is none"),
        pytest.param(
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic': must be one of default, linear, llama3, yarn",
            id="frequencies that depend on the longest request",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_type='longrope'",
            id="frequencies that depend on the longest request, the other kind",
        ),
        pytest.param(
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'", id="the same, spelt as of old"
        ),
        pytest.param({"rope_theta": 0}, "rope_theta=0: must be a number above 0", id="a base of 0"),
        pytest.param({"rope_theta": -1.0}, "rope_theta=-1.0: must be", id="a base below 0"),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "factor=0", id="a factor of 0"
        ),
        pytest.param({"rope_parameters": {"rope_type": ["x"]}}, "rope_type=", id="a kind that is no text"),
        pytest.param({"max_position_embeddings": 0}, "max_position_embeddings=0: 1 to", id="no positions"),
        pytest.param({"max_position_embeddings": 10**18}, "max_position_embeddings=1", id="too many positions"),
        pytest.param({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: the files", id="too many layers"),
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers=0", id="no layers"),
        pytest.param({"hidden_act": "nonsense"}, "does not make a model", id="an unknown activation"),
        pytest.param({"num_attention_heads": 5}, "is refused by its class", id="a config its class refuses"),
        pytest.param({"num_attention_heads": 0}, "", id="no heads"),
        pytest.param({"num_key_value_heads": 3, "head_dim": 8}, "", id="heads that do not share evenly"),
        pytest.param({"return_dict": False}, "a forward without weights fails", id="an answer of another shape"),
    ],
)
def test_refused_by_config(changes: dict[str, Any], rule: str) -> None:
    """The refusal names config.json, or the tensor that contradicts it, and the rule."""
    failure = rejection(job(changes))
    assert rule in failure.reason
    assert failure.path == CONFIG or not rule


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_frequencies_are_judged_for_each_kind_of_layer(kind: str) -> None:
    """Gemma has rotary parameters per kind of layer. None may depend on the longest request."""
    parameters = json.loads(tiny("gemma3").config_json)["rope_parameters"]
    parameters[kind] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rope_type='dynamic'" in rejection(job({"rope_parameters": parameters}, "gemma3")).reason


def test_experts_are_used_in_the_order_of_the_fused_tensor() -> None:
    """In this order whole pages of experts need no copy: gate and up of each expert, then down of each."""
    experts = [name for name in check_architecture(tiny("qwen3 moe").job).first_use if "layers.0.mlp.experts" in name]
    inner = "model.layers.0.mlp.experts"
    assert experts == [
        *(f"{inner}.{expert}.{part}_proj.weight" for expert in range(6) for part in ("gate", "up")),
        *(f"{inner}.{expert}.down_proj.weight" for expert in range(6)),
    ]


def test_excess_experts_cost_nothing() -> None:
    """Claimed experts beyond the files' tensors are refused early."""
    failure = rejection(job({"num_experts": 10**9}, "qwen3 moe"))
    assert failure == ArtifactRejected(
        CONFIG, f"1000000000 experts: the files hold {len(tiny('qwen3 moe').tensors)} tensors"
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rms_norm_eps": NaN}', "\udcff"])
def test_refused_as_json(text: str) -> None:
    """Anything but a JSON object is refused before the library sees it."""
    assert rejection(GateJob(config_json=text, tensors={})).path == CONFIG


@pytest.mark.parametrize("key", ["architectures", "model_type", "dtype", "rope_scaling", "num_hidden_layers"])
def test_long_value_is_not_shown_whole(key: str) -> None:
    """Messages stay short, whatever the config holds."""
    refused = rejection(
        job({key: {"architectures": ["x" * 900_000], "num_hidden_layers": 10**3000}.get(key, "x" * 900_000)})
    )
    assert len(refused.message) < 1000


def test_upload_without_tensors_is_refused() -> None:
    assert rejection(GateJob(config_json=tiny("llama").config_json.decode(), tensors={})).path == CONFIG


Headers = dict[str, tuple[str, tuple[int, ...]]]


def drop(name: str) -> Callable[[Headers], object]:
    return lambda headers: headers.pop(name)


def put(name: str, dtype: str, *shape: int) -> Callable[[Headers], object]:
    return lambda headers: headers.__setitem__(name, (dtype, shape))


@pytest.mark.parametrize(
    ("change", "path", "rule"),
    [
        pytest.param(drop("model.norm.weight"), "model.norm.weight", "is missing", id="missing"),
        pytest.param(drop("lm_head.weight"), "lm_head.weight", "is missing", id="a head that is not tied"),
        pytest.param(put("x.inv_freq", "F32", 4), "x.inv_freq", "has no such tensor", id="one that nothing takes"),
        pytest.param(
            put("model.norm.weight", "F32", 31), "model.norm.weight", "has shape [31], but the config means [32]",
            id="another shape",
        ),
        pytest.param(
            put("model.norm.weight", "BF16", 32), "model.norm.weight", "is stored as BF16, but", id="another dtype"
        ),
        pytest.param(put("model.norm.weight", "I8", 32), "model.norm.weight", "is stored as I8", id="integers"),
    ],
)  # fmt: skip
def test_refused_by_tensor(change: Callable[[Headers], object], path: str, rule: str) -> None:
    """The refusal names the tensor and the rule."""
    headers = dict(tiny("llama").job.tensors)
    change(headers)
    failure = rejection(GateJob(config_json=tiny("llama").config_json.decode(), tensors=headers))
    assert failure.path == path
    assert rule in failure.reason


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_dtype_by_either_name_or_by_the_tensors(key: str | None) -> None:
    """The dtype is read under its new or old name, or taken from the tensors."""
    model = tiny("llama", torch.bfloat16)
    values = json.loads(model.config_json)
    del values["dtype"]
    if key:
        values[key] = "bfloat16"
    assert check_architecture(GateJob(config_json=json.dumps(values), tensors=model.job.tensors)).dtype == "bfloat16"


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "lm_head.weight"])
def test_either_end_of_a_tie_may_be_stored(key: str) -> None:
    headers = dict(tiny("llama tied").job.tensors)
    headers[key] = headers.pop("model.embed_tokens.weight")
    facts = check_architecture(GateJob(config_json=tiny("llama tied").config_json.decode(), tensors=headers))
    assert key in facts.first_use


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "dtype": "float32"}


def other_family(
    monkeypatch: pytest.MonkeyPatch, model: type[nn.Module], config: Any, values: dict[str, Any]
) -> GateJob:
    """Return the job of a model whose family is added to the table."""
    name, made = model.__name__, config(**SMALL, **values)
    monkeypatch.setattr(architecture_gate, "DECODERS", {**DECODERS, name: Family(model, config, config.model_type)})
    with torch.device("meta"):
        build: Any = model
        parameters = dict(build(made).named_parameters())
    headers = {key: ("F32", tuple(parameter.shape)) for key, parameter in parameters.items()}
    return GateJob(config_json=json.dumps({**SMALL, **values, "architectures": [name]}), tensors=headers)


@pytest.mark.parametrize(
    ("model", "config", "values", "rule"),
    [
        pytest.param(
            BloomForCausalLM, BloomConfig, {"n_layer": 2, "n_head": 4}, "of 2 layers, 0 attend", id="never calls us"
        ),
        pytest.param(
            Gemma2ForCausalLM,
            Gemma2Config,
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 64,
            },
            "layer 0 has attention with 'softcap'",
            id="needs a soft cap",
        ),
        pytest.param(
            GPTJForCausalLM,
            GPTJConfig,
            {"n_layer": 2, "n_head": 4, "rotary_dim": 4},
            "does not make a model: 'kelvin_gate'",
            id="has attention of its own only",
        ),
    ],
)
def test_families_that_would_be_wrong(
    model: type[nn.Module], config: Any, values: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in the table, a family that this engine computes wrongly is refused by a trial forward."""
    failure = rejection(other_family(monkeypatch, model, config, values))
    assert rule in failure.reason


class IdleLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama with a projection that no forward calls."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.idle = nn.Linear(4, 4, bias=False)


def test_a_tensor_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that no forward uses is refused by name."""
    values = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    failure = rejection(other_family(monkeypatch, IdleLlama, LlamaConfig, values))
    assert failure == ArtifactRejected("idle.weight", "no forward of this architecture uses it")


def test_a_mask_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: attention with a mask, dropout or an unknown argument is refused."""
    record = architecture_gate._record
    for spoilt, rule in (
        ({"attention_mask": torch.ones(1)}, "needs a mask"),
        ({"dropout": 0.1}, "with dropout"),
        ({"position_bias": 1.0}, "with 'position_bias'"),
        ({"sliding_window": 0}, "a window that is not positive"),
        ({"scaling": None}, "without a scale"),
        ({"is_causal": False}, "that is not causal"),
    ):

        def spoiling(module: Any, q: Any, k: Any, v: Any, mask: Any = None, *, spoilt: Any = spoilt, **kw: Any) -> Any:
            return record(module, q, k, v, **{"attention_mask": mask, **kw, **spoilt})

        monkeypatch.setattr(architecture_gate, "_record", spoiling)
        assert rule in rejection(tiny("llama").job).reason


def test_a_layer_that_does_not_attend_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one attention call fewer than layers is refused."""
    record = architecture_gate._record

    def deaf(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx != 1:
            return record(module, query, *args, **kwargs)
        return query.transpose(1, 2), None

    monkeypatch.setattr(architecture_gate, "_record", deaf)
    assert "of 3 layers, 2 attend" in rejection(tiny("llama").job).reason
