"""Small tokenizers made in memory, of the two kinds that decoder models use."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "In the beginning was the word. Größe, naïve café, 中文字符, 日本語, Ελληνικά, emoji 😀🎉👩‍👩‍👧, "
    "def f(x):\n    return x + 1\n",
) * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_level() -> bytes:
    """Return `tokenizer.json` of a byte-level BPE with start and end tokens, and an added token with a space."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    core.add_tokens([AddedToken("two words", normalized=False)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return core.to_str().encode()


@cache
def metaspace(strip: bool = True) -> bytes:
    """Return `tokenizer.json` of a BPE with `▁` for spaces and bytes for unknown characters, like Llama 2."""
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    base.train_from_iterator(["the word was in the beginning"] * 8, trainer)
    state = json.loads(base.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    # Byte pieces must not be special tokens, otherwise they are not decoded.
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return core.to_str().encode()


def files(tokenizer: bytes | None = None, **changes: object) -> dict[str, bytes]:
    """Return a version's pinned files. `changes` go into `tokenizer_config.json`."""
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
    } | changes
    return {
        "tokenizer.json": byte_level() if tokenizer is None else tokenizer,
        "tokenizer_config.json": json.dumps(
            {key: value for key, value in config.items() if value is not None}
        ).encode(),
        "config.json": json.dumps({"eos_token_id": 1}).encode(),
    }
