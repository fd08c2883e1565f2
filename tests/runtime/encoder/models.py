"""Tiny encoders in sentence-transformers' layout, engines over them, and the library's own vectors."""

import atexit
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

from kelvin.contracts.artifacts.manifest import Engine as EngineOf
from kelvin.contracts.artifacts.manifest import Limits, Manifest
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob
from runtime.drivers.interface import Embedded, EmbeddingRequest, Event
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.lifecycle.sealing_jobs import gate
from runtime.models.binding import TORCH_DTYPES, BindMethod, BoundModel, bind

torch.set_num_threads(1)

CPU = torch.device("cpu")
WORDS = 60
FAMILIES = {"bert": "BertModel", "mpnet": "MPNetModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
PACKAGE = "sentence_transformers.models"
_ROOT = TemporaryDirectory(prefix="kelvin-encoders-")
atexit.register(_ROOT.cleanup)
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_encoder(
    directory: Path, family: str = "bert", pooling: str = "mean", *, normalize: bool = True, dtype: str = "float32"
) -> Path:
    """Write a directory like sentence-transformers, with one token per word `w0 ... w59` between `<s>` and `</s>`."""
    shape: dict[str, Any] = {
        "vocab_size": WORDS + 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 72,
        "pad_token_id": 1,
        "initializer_range": 0.3,
    }
    torch.manual_seed(3)
    model = AutoModel.from_config(AutoConfig.for_model(family, **shape), dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{f"w{n}": n + 4 for n in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    write = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **named},
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True},
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"{PACKAGE}.{name}"}
            for at, (path, name) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_N", "Normalize")])
            if normalize or name != "Normalize"
        ],
    }
    for path, content in write.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(json.dumps(content))
    return directory


@dataclass(frozen=True)
class TinyEncoder:
    """The directory's files as the runtime meets them."""

    directory: Path
    files: dict[str, bytes]
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def manifest(self) -> Manifest:
        architecture = json.loads(self.files["config.json"])["architectures"][0]
        name: Any = next(name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype)
        limits = Limits(64, 1)
        return Manifest(1, EngineOf(1, architecture, name, "embed"), limits, 8 << 20, (), (), ())

    @property
    def job(self) -> GateJob:
        recipe = {path: content.decode() for path, content in self.files.items()}
        tensors = {name: (_STORED[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return GateJob(config_json=recipe["config.json"], tensors=tensors, recipe=recipe)

    def facts(self) -> GateFacts:
        return gate(self.job)

    def bound(self, bind_method: BindMethod = "fast") -> BoundModel:
        raw = self.files["config.json"]
        return bind(self.manifest, raw, self.tensors, bind_method=bind_method, dtype=self.dtype, device=CPU)

    def engine(self, **options: Any) -> EncoderEngine:
        options = {"version": "v" * 64, "device": CPU, **options}
        bound = options.pop("bound", None) or self.bound()
        return EncoderEngine(bound, read_recipe(self.files), self.facts(), **options)


@cache
def tiny(
    family: str = "bert", pooling: str = "mean_tokens", normalize: bool = True, dtype: str = "float32"
) -> TinyEncoder:
    """Return a tiny encoder with the same weights each time. Tests must not write to them."""
    directory = write_encoder(
        Path(_ROOT.name) / f"{family}-{pooling}-{normalize}-{dtype}", family, pooling, normalize=normalize, dtype=dtype
    )
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    paths = [path for path in directory.rglob("*.json") if path.is_file()]
    files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    return TinyEncoder(directory, files, tensors, getattr(torch, dtype))


def text_of(sequence: Sequence[int]) -> str:
    """Return the text whose tokens are `sequence`, without the special ones."""
    return " ".join(f"w{token - 4}" for token in sequence[1:-1])


def sequences() -> tuple[tuple[int, ...], ...]:
    """Return sequences of many lengths, up to the longest one allowed."""
    generator = torch.Generator().manual_seed(5)
    inner = [torch.randint(4, WORDS + 4, (n,), generator=generator).tolist() for n in (1, 5, 62, 2, 17, 30, 8, 1)]
    return tuple((0, *ids, 2) for ids in inner)


def by_the_library(model: TinyEncoder, items: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the vectors by sentence-transformers, computed one by one."""
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(model.directory), device="cpu", local_files_only=True)
    return torch.stack([library.encode([text_of(item)], convert_to_tensor=True)[0].float() for item in items])


def ask(request_id: str, *items: Sequence[int]) -> EmbeddingRequest:
    return EmbeddingRequest(request_id=request_id, sequences=tuple(map(tuple, items)))


def vectors_of(events: Sequence[Event], request_id: str) -> torch.Tensor:
    found = [event.vector for event in events if isinstance(event, Embedded) and event.request_id == request_id]
    return torch.stack([torch.frombuffer(bytearray(vector), dtype=torch.float32) for vector in found])
