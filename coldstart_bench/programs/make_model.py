"""Make a Llama of a given size from a seed, in Hugging Face layout. Arguments: directory, bytes, seed, and `sharp`.

Weights are bfloat16 noise at the scale of a trained model. With `sharp` they are float32 noise (twice the bytes) whose
largest logit is far above the next one, so that batching with other requests does not change a text. The tokenizer has
one token per word `w0 w1 …`, so a prompt of n words has n tokens.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HEAD, VOCABULARY = 16, 64, 32000


def kv_heads(hidden: int) -> int:
    """Return a quarter of the heads if that is whole, else two."""
    heads = hidden // HEAD
    return heads // 4 if heads % 4 == 0 else 2


def shape_for(total_bytes: int) -> LlamaConfig:
    """Return a 16-layer Llama whose bfloat16 weights come closest to `total_bytes`."""

    def weights(hidden: int) -> int:
        middle = hidden * 11 // 4 // 64 * 64
        return 2 * VOCABULARY * hidden + LAYERS * (
            2 * hidden * hidden + 2 * hidden * HEAD * kv_heads(hidden) + 3 * hidden * middle
        )

    hidden = min(range(256, 8192, 128), key=lambda width: abs(2 * weights(width) - total_bytes))
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=kv_heads(hidden),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )


def main() -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    directory, total_bytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    config = shape_for(total_bytes)
    sharp = sys.argv[4:] == ["sharp"]
    dtype, scale = (torch.float32, 0.3) if sharp else (torch.bfloat16, 0.02)
    config.dtype = dtype
    config.architectures = ["LlamaForCausalLM"]
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    tensors = {}
    for name, parameter in skeleton.state_dict().items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(parameter.shape, dtype=dtype)
        else:
            tensors[name] = torch.empty(parameter.shape, dtype=dtype).normal_(0, scale, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    words = {"<s>": 0, "</s>": 1, **{f"▁w{n}": n + 2 for n in range(VOCABULARY - 2)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


if __name__ == "__main__":
    main()
