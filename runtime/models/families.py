"""The served model classes, and how their parameters differ from what checkpoints store.

To serve another class, add it to `DECODERS` or `ENCODERS`, and add a row to the tests that compare with the library.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MPNetConfig,
    MPNetModel,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from kelvin.contracts.artifacts.manifest import Kind
from runtime.models.attention_hook import ATTENTION


@dataclass(frozen=True, slots=True)
class Fusion:
    """A 3-D parameter of all experts that checkpoints store as matrices named `PREFIX.EXPERT.PART.weight`.

    The parameter's bytes are those of the matrices, in the order of experts, and of `parts` within an expert.
    """

    parameter: str  # the last part of its name, after the module of the experts
    parts: tuple[str, ...]

    def stored_matrices(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the stored matrices of parameter `name`, in order."""
        prefix = name.removesuffix(self.parameter)
        experts, rows, columns = shape
        for expert in range(experts):
            for part in self.parts:
                yield f"{prefix}{expert}.{part}.weight", (rows // len(self.parts), columns)


@dataclass(frozen=True, slots=True)
class Family:
    """The classes for one name in a config's `architectures`."""

    model: type[nn.Module]
    config: type[PreTrainedConfig]
    model_type: str
    fusions: tuple[Fusion, ...] = ()
    ignored_tensors: frozenset[str] = frozenset()  # tensors of older checkpoints that the library computes itself
    kind: Kind = "generate"
    attention: str = ATTENTION  # an encoder uses the library's own, since it has no KV cache
    positions_start_after_padding: bool = False  # the first position is pad_token_id + 1

    def reserved_positions(self, config: PreTrainedConfig) -> int:
        """Return how many rows of the position table no token uses."""
        return config.pad_token_id + 1 if self.positions_start_after_padding else 0

    def find_fusion(self, name: str) -> Fusion | None:
        """Return how parameter `name` is fused, or None if checkpoints store it as it is."""
        return next((fusion for fusion in self.fusions if name.endswith(f".experts.{fusion.parameter}")), None)


# The same fusions that transformers does when it loads these checkpoints. Sealing compares the results.
_EXPERTS: Final = (Fusion("gate_up_proj", ("gate_proj", "up_proj")), Fusion("down_proj", ("down_proj",)))

DECODERS: Final[Mapping[str, Family]] = {
    "Gemma3ForCausalLM": Family(Gemma3ForCausalLM, Gemma3TextConfig, "gemma3_text"),
    "LlamaForCausalLM": Family(LlamaForCausalLM, LlamaConfig, "llama"),
    "MistralForCausalLM": Family(MistralForCausalLM, MistralConfig, "mistral"),
    "Qwen2ForCausalLM": Family(Qwen2ForCausalLM, Qwen2Config, "qwen2"),
    "Qwen3ForCausalLM": Family(Qwen3ForCausalLM, Qwen3Config, "qwen3"),
    "Qwen3MoeForCausalLM": Family(Qwen3MoeForCausalLM, Qwen3MoeConfig, "qwen3_moe", _EXPERTS),
}
_POSITION_IDS: Final = frozenset({"embeddings.position_ids"})


def _encoder(
    model: type[nn.Module],
    config: type[PreTrainedConfig],
    model_type: str,
    *,
    positions_start_after_padding: bool = False,
    attention: str = "sdpa",
) -> Family:
    return Family(
        model,
        config,
        model_type,
        ignored_tensors=_POSITION_IDS,
        kind="embed",
        attention=attention,
        positions_start_after_padding=positions_start_after_padding,
    )


ENCODERS: Final[Mapping[str, Family]] = {
    "BertModel": _encoder(BertModel, BertConfig, "bert"),
    "MPNetModel": _encoder(MPNetModel, MPNetConfig, "mpnet", positions_start_after_padding=True, attention="eager"),
    "RobertaModel": _encoder(RobertaModel, RobertaConfig, "roberta", positions_start_after_padding=True),
    "XLMRobertaModel": _encoder(XLMRobertaModel, XLMRobertaConfig, "xlm-roberta", positions_start_after_padding=True),
}
SERVED: Final[Mapping[str, Family]] = {**DECODERS, **ENCODERS}
