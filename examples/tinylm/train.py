"""Train tinylm, a small Llama-architecture language model, from scratch on one CPU core.

The text is the King James Bible, read through the ``bible`` command of the Debian packages ``bible-kjv``
and ``bible-kjv-text``. The result is a directory in the Hugging Face layout: a byte-level BPE tokenizer
with a plain-text chat template, and bfloat16 weights that ``AutoModelForCausalLM`` loads.

    python train.py --out model

The run depends only on its arguments: seeds are fixed, and the number of steps, not the clock, ends it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BOS, EOS = "<s>", "</s>"
VOCAB_SIZE = 2048
CONTEXT = 2048
HOLD_OUT = 20  # every 20th chapter is kept for validation

# Messages become plain text, one per line, whatever their role: the model continues the text.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"

SAMPLE_PROMPTS = ("In the beginning", "And the king said unto", "Blessed is the man that")


@dataclass(frozen=True)
class Stage:
    """One stage of training: `steps` steps, each over `parts` batches of `rows` rows of `length` tokens.

    Small parts stay in the processor's cache, so they are faster than one large batch.
    """

    steps: int
    parts: int
    rows: int
    length: int
    attention: str


def read_chapters() -> list[str]:
    """Return the chapters of the Bible in order, one verse per line, without verse numbers."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    dump = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    chapters: dict[str, list[str]] = {}
    for line in dump.stdout.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+\d+):\d+ (.+)", line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        chapters.setdefault(match[1], []).append(match[2].strip() + "\n")
    return ["".join(verses) for verses in chapters.values()]


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the start token before every text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(bos: int, eos: int) -> LlamaForCausalLM:
    """Return a freshly initialised model in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)
    return model


def pack(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chapters as one stream, each between start and end tokens, and where verses start in it."""
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    ids: list[int] = []
    for chapter in chapters:
        ids += [*tokenizer.backend_tokenizer.encode(chapter).ids, tokenizer.eos_token_id]
    stream = torch.tensor(ids)
    begins = (stream == tokenizer.bos_token_id) | (stream == newline)
    return stream, begins.nonzero().flatten()


def sample_batch(
    stream: torch.Tensor, begins: torch.Tensor, stage: Stage, bos: int, rng: torch.Generator
) -> torch.Tensor:
    """Return rows that each hold the start token and the text from a random verse on."""
    usable = begins[begins < len(stream) - stage.length]
    at = usable[torch.randint(len(usable), (stage.rows,), generator=rng)]
    rows = stream[at[:, None] + torch.arange(stage.length)]
    rows[:, 0] = bos
    return rows


@torch.inference_mode()
def validation_loss(model: torch.nn.Module, stream: torch.Tensor, length: int) -> float:
    """Return the mean loss in nats per token over the held-out stream, cut into rows of `length`."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    losses = [model(input_ids=row[None], labels=row[None]).loss.float() for row in rows]
    return float(sum(losses)) / len(rows)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(layers, lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(progress: float) -> float:
    """Return a short linear warm-up followed by a cosine down to a fiftieth of the peak."""
    if progress < 0.03:
        return (progress + 1e-3) / 0.03
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a copy of the weights in bfloat16, and the tokenizer, in the Hugging Face layout."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    # The class name that every version of AutoTokenizer knows.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def report(out: Path, stream: torch.Tensor, known: set[str]) -> None:
    """Print the saved model's validation loss, then greedy texts, each with its share of known words."""
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for length in (256, 1024):
        print(f"validation loss at length {length}: {validation_loss(model, stream, length):.3f}")
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
        text = tokenizer.decode(output[0], skip_special_tokens=True)
        words = re.findall(r"[a-z]+", text[len(prompt) :].lower())
        share = sum(word in known for word in words) / max(1, len(words))
        print(f"--- {len(words)} words, {share:.0%} of them known\n{text}")


def main() -> None:
    """Train, saving as it goes, and report on what was saved."""
    parser = argparse.ArgumentParser(description="Train tinylm on one CPU core.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, for a trial run")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    rng = torch.Generator().manual_seed(args.seed)

    chapters = read_chapters()
    train_texts = [text for index, text in enumerate(chapters) if index % HOLD_OUT != HOLD_OUT - 1]
    tokenizer = build_tokenizer(train_texts)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    stream, begins = pack(tokenizer, train_texts)
    held_out, _ = pack(tokenizer, chapters[HOLD_OUT - 1 :: HOLD_OUT])
    model = build_model(bos, eos).train()
    print(f"{model.num_parameters():,} parameters, {len(stream):,} + {len(held_out):,} tokens", flush=True)

    # Short rows first, then a few longer ones, so that text stays sensible past the short length.
    stages = [
        Stage(round(2500 * args.scale), parts=2, rows=4, length=256, attention="eager"),
        Stage(round(200 * args.scale), parts=2, rows=1, length=1024, attention="sdpa"),
    ]
    plan = [stage for stage in stages for _ in range(stage.steps)]
    optimizers = build_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    for step, stage in enumerate(plan, 1):
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(step / len(plan))
        model.set_attn_implementation(stage.attention)
        for _ in range(stage.parts):
            rows = sample_batch(stream, begins, stage, bos, rng)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=rows, labels=rows).loss / stage.parts
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item() * stage.parts:.3f} {time.process_time():.0f} s", flush=True)
        if step % 250 == 0:
            save(model, tokenizer, args.out)
    save(model, tokenizer, args.out)
    print(f"trained in {time.process_time():.0f} s of processor time")
    report(args.out, held_out, set(re.findall(r"[a-z]+", " ".join(chapters).lower())))


if __name__ == "__main__":
    main()
