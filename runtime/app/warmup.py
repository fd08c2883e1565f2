"""Perform a decoder's restore and response once, on a model of a few kilobytes, while a standby is parked.

Leases, encoders, ONNX sessions and content filters are not warmed up.

In a forked process every first use is slow: memory shared with the parent is copied at Python's first write, and
libraries initialise at their first operation. A warm-up pays that cost while no request waits.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from kelvin.contracts.artifacts.manifest import ENGINE_INTERFACE, Engine, Limits, Manifest
from kelvin.contracts.artifacts.runtime_control import GateFacts
from kelvin.contracts.serving.stream_frames import Counts
from runtime.app.heap import prefault_heap
from runtime.drivers.interface import Finished, Generated, GenerationRequest, Sampling
from runtime.drivers.native.engine import ModelEngine
from runtime.models.binding import BoundModel, bind, build_skeleton, parse_config
from runtime.models.families import SERVED
from runtime.predictor.onnx_session import installed_fingerprint
from runtime.surface.answer_builder import TextAnswerBuilder
from runtime.surface.openai_answers import ResponseMetadata, choose_renderer
from runtime.surface.openai_requests import ChatPrompt, decode_chat
from runtime.text.tokenizer import TextCodec

_ARCHITECTURE: Final = "LlamaForCausalLM"
_HEADS, _DIM, _LAYERS, _VOCAB = 2, 32, 2, 64
_CONFIG: Final[dict[str, Any]] = {
    "architectures": [_ARCHITECTURE],
    "vocab_size": _VOCAB,
    "hidden_size": _HEADS * _DIM,
    "intermediate_size": 128,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": 64,
}
_FACTS: Final = GateFacts(
    architecture=_ARCHITECTURE,
    dtype="bfloat16",
    layers=_LAYERS,
    kv_heads=_HEADS,
    head_dim=_DIM,
    value_dim=_DIM,
    vocab_size=_VOCAB,
    max_positions=64,
    kv_bytes_per_token=2 * 2 * _LAYERS * _HEADS * _DIM,
    first_use=(),
)
_MANIFEST: Final = Manifest(
    format=1,
    engine=Engine(ENGINE_INTERFACE, _ARCHITECTURE, "bfloat16"),
    limits=Limits(max_input_tokens=32, max_output_tokens=4),
    chunk_bytes=4096,
    files=(),
    tensors=(),
    chunks=(),
)
_TOKENIZER: Final = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
_TEMPLATE: Final = "{% for message in messages %}{{ message['role'] + '\\n' + message.content }}{% endfor %}"
_REQUEST: Final = b'{"messages":[{"role":"user","content":"ab"}],"stream":true,"temperature":0,"max_tokens":1}'
_HEADING: Final = ResponseMetadata("warm-up", "warm-up", "", 0)


class WarmUp:
    """The steps of a warm-up. It may stop after any of them, and its model is discarded."""

    def __init__(self) -> None:
        self._bound: BoundModel | None = None

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        """Return the steps in order. Each is short, because a bind may have to wait for one."""
        return (self._text, self._model, self._engine, prefault_heap)

    def _text(self) -> None:
        config = {"chat_template": _TEMPLATE}
        codec = TextCodec(
            {"tokenizer.json": json.dumps(_TOKENIZER).encode(), "tokenizer_config.json": json.dumps(config).encode()}
        )
        installed_fingerprint()
        call = decode_chat(_REQUEST)
        assert isinstance(call.prompt, ChatPrompt)
        ids = codec.encode_chat(call.prompt.messages)
        renderer = choose_renderer(_HEADING, chat=True, stream=call.stream, include_usage=True)
        answer = TextAnswerBuilder(renderer, codec.detokenizer(ids), call.stops)
        answer.add_events([Generated("", 2, Counts()), Finished("", "length", Counts())])

    def _model(self) -> None:
        family, dtype, raw = SERVED[_ARCHITECTURE], torch.bfloat16, json.dumps(_CONFIG).encode()
        parameters = build_skeleton(family, parse_config(family, raw, dtype)).named_parameters()
        tensors = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in parameters}
        device = torch.device("cpu")
        self._bound = bind(_MANIFEST, raw, tensors, bind_method="fast", dtype=dtype, device=device)

    def _engine(self) -> None:
        assert self._bound is not None
        kv_bytes = _FACTS.kv_bytes_per_token * 16 * 8
        device = torch.device("cpu")
        engine = ModelEngine(self._bound, _FACTS, version="warm-up", kv_bytes=kv_bytes, device=device)
        sampling = Sampling(max_tokens=2, temperature=1.0, top_k=4, top_p=0.9)
        engine.admit(GenerationRequest(request_id="warm-up", prompt_ids=tuple(range(20)), sampling=sampling))
        while engine.has_work:
            engine.step()
        self._bound = None
