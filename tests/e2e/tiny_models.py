"""Small random models of every served family, and their reference answers.

Libraries are imported on use, because the import takes seconds in each worker that collects.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = 61
EOS = 1
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


# Config of a family beyond the common shape. Windows are shorter than the tests' sequences.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


def make_tiny(directory: Path, family: str, seed: int = 1, *, layers: int = 2, dtype: str = "float32") -> Path:
    """Write a decoder of a few hundred kilobytes in Hugging Face layout, with one token per word `w0 ... w60`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": WORDS + 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        **FAMILIES[family],
    }
    config = AutoConfig.for_model(family, **shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)  # far from ties, so that a wrong bit shows
        model.get_output_embeddings().weight[EOS] = 0  # no greedy answer ends early
    model.save_pretrained(directory)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"▁w{n}": n + 3 for n in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return directory


def prompt_of(ids: Sequence[int]) -> str:
    """Return the text whose tokens are `ids`."""
    return " ".join(f"w{token - 3}" for token in ids)


def words_of(stream: str) -> int:
    """Return the number of tokens in a stream's text. These models write one word per token."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return len(re.findall(r"w\d+|<s>|</s>|<unk>", text))


def text_of(directory: Path, ids: Sequence[int]) -> str:
    """Return the text of generated `ids` by the model's tokenizer, without the end token (1)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return str(tokenizer.decode([token for token in ids if token != 1], skip_special_tokens=False)).strip()


def greedy_continuation(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy continuation of `prompt` by `transformers.generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    return [int(token) for token in out[0, len(prompt) :]]
