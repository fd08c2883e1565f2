"""What the engine refuses at the door: what breaks a rule, and what could never fit. Waiting is the queue's work."""

from dataclasses import dataclass
from math import isfinite

from contracts.errors import CapacityExceeded, Failure, InvalidRequest, LimitExceeded
from runtime.engine.interface import GenerationRequest, Sampling
from runtime.policy.blocks import blocks_for, worst_case_tokens


@dataclass(frozen=True, slots=True)
class Room:
    """The most that one request may be."""

    vocab_size: int
    max_positions: int
    kv_blocks: int


def judge(request: GenerationRequest, room: Room) -> Failure | None:
    """Why the request can never run here, or None. First reason wins."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        return InvalidRequest("prompt", "[]", "must hold a token")
    # On a device an id outside the embedding would be an error of the whole context, not of the request.
    if min(prompt) < 0 or max(prompt) >= room.vocab_size:
        stranger = next(token for token in prompt if not 0 <= token < room.vocab_size)
        return InvalidRequest("prompt", str(stranger), f"must be a token id from 0 to {room.vocab_size - 1}")
    if (fault := _sampling_fault(sampling)) is not None:
        return fault
    total = len(prompt) + sampling.max_tokens
    if total > room.max_positions:
        return LimitExceeded("prompt plus max_tokens", total, room.max_positions, "tokens")
    need = blocks_for(worst_case_tokens(len(prompt), sampling.max_tokens))
    if need > room.kv_blocks:
        return CapacityExceeded("KV blocks for prompt plus max_tokens", need, room.kv_blocks)
    return None


def _sampling_fault(sampling: Sampling) -> InvalidRequest | None:
    if sampling.max_tokens < 1:
        return InvalidRequest("max_tokens", str(sampling.max_tokens), "must be 1 or more")
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
        return InvalidRequest("temperature", str(sampling.temperature), "must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        return InvalidRequest("top_p", str(sampling.top_p), "must be over 0 and at most 1")
    if sampling.top_k < 0:
        return InvalidRequest("top_k", str(sampling.top_k), "must be 0 (off) or more")
    return None
