"""Make tiny models quickly, and hostile variants of them: Hugging Face layout, written by NumPy alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

WORDS: Final = 61
HIDDEN: Final = 64
INNER: Final = 128
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "dtype": "float32",
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": WORDS + 3,
}
_METASPACE: Final = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def make_tiny(directory: Path, seed: int = 1, *, layers: int = 2) -> Path:
    """Write a Llama of a few hundred kilobytes with one token for each word `w0 ... w60`; return its directory."""
    directory.mkdir(parents=True)
    _write(directory / "config.json", CONFIG | {"num_hidden_layers": layers})
    _write(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
         "chat_template": TEMPLATE},
    )  # fmt: skip
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"▁w{n}": n + 3 for n in range(WORDS)}}
    _write(
        directory / "tokenizer.json",
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
         "pre_tokenizer": _METASPACE, "post_processor": None, "decoder": _METASPACE,
         "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}},
    )  # fmt: skip
    save_file(_weights(seed, layers), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def variant(source: Path, directory: Path, **changes: Callable[[Any], Any]) -> Path:
    """Copy a model; `config`, `tokenizer` or `tokenizer_config` name a file of JSON and what becomes of its content."""
    shutil.copytree(source, directory)
    for name, change in changes.items():
        path = directory / f"{name}.json"
        _write(path, change(json.loads(path.read_text())))
    return directory


def with_template(source: Path, directory: Path, template: str) -> Path:
    """Copy a model, with this chat template."""
    return variant(source, directory, tokenizer_config=lambda config: config | {"chat_template": template})


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def _weights(seed: int, layers: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int = HIDDEN) -> Any:
        return random.normal(0, 0.3, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    found = {"lm_head.weight": matrix(WORDS + 3), "model.embed_tokens.weight": matrix(WORDS + 3)}
    found["lm_head.weight"][1] = 0  # an answer ends where the caller ends it
    found["model.norm.weight"] = ones
    for layer in range(layers):
        here = f"model.layers.{layer}."
        found |= {
            f"{here}input_layernorm.weight": ones,
            f"{here}post_attention_layernorm.weight": ones,
            f"{here}mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{here}mlp.gate_proj.weight": matrix(INNER),
            f"{here}mlp.up_proj.weight": matrix(INNER),
            f"{here}self_attn.k_proj.weight": matrix(32),
            f"{here}self_attn.v_proj.weight": matrix(32),
            f"{here}self_attn.o_proj.weight": matrix(HIDDEN),
            f"{here}self_attn.q_proj.weight": matrix(HIDDEN),
        }
    return found
