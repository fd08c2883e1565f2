"""The engine of encoders: a row is a sequence of token ids, its answer a vector. See `batch_engine.py` for batches."""

import logging
import time
from array import array
from collections.abc import Callable, Sequence

import torch

from kelvin.contracts.artifacts.runtime_control import GateFacts, Probe
from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded
from runtime.drivers.batch_engine import BatchEngine, RowRange
from runtime.drivers.batching_policy import CPU_TOKENS, CUDA_TOKENS, BatchingWindow
from runtime.drivers.interface import Embedded, EmbeddingRequest, Event, Request
from runtime.encoder import probe as known_answers
from runtime.encoder.model import EncoderModel
from runtime.encoder.recipe import Recipe
from runtime.models.binding import BoundModel

_log = logging.getLogger(__name__)


class EncoderEngine(BatchEngine[EmbeddingRequest, torch.Tensor]):
    """The engine of one bound encoder."""

    def __init__(
        self,
        bound: BoundModel,
        recipe: Recipe,
        facts: GateFacts,
        *,
        version: str,
        device: torch.device,
        probe: Probe | None = None,
        max_waiting: int = 1024,
        max_tokens: int | None = None,
        window: BatchingWindow | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(
            version=version,
            probe=probe,
            probe_tokens=0 if probe is None else len(probe.token_ids),
            max_waiting=max_waiting,
            max_tokens=max_tokens or (CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS),
            window=window,
            clock_ns=clock_ns,
        )
        self._model = EncoderModel(bound, recipe, device)
        self._facts = facts

    @property
    def last_layer_started_s(self) -> float:
        return self._model.last_layer_started_s

    def _accept(self, request: Request) -> EmbeddingRequest | Failure:
        if not isinstance(request, EmbeddingRequest):
            return Internal()  # the API sends an encoder nothing else
        if not request.sequences:
            return InvalidRequest("input", "[]", "must hold a text")
        for sequence in request.sequences:
            if not sequence:
                return InvalidRequest("input", "[]", "must hold a token")
            if len(sequence) > self._facts.max_positions:
                return LimitExceeded("input", len(sequence), self._facts.max_positions, "tokens")
            # On a device, an id outside the embedding would break the whole CUDA context, not only this request.
            if min(sequence) < 0 or max(sequence) >= self._facts.vocab_size:
                invalid_id = next(token for token in sequence if not 0 <= token < self._facts.vocab_size)
                return InvalidRequest("input", str(invalid_id), f"must be a token id under {self._facts.vocab_size}")
        return request

    def _costs(self, request: EmbeddingRequest) -> Sequence[int]:
        return [len(sequence) for sequence in request.sequences]

    def _forward(
        self, ranges: Sequence[RowRange[EmbeddingRequest]], probe: Probe | None
    ) -> tuple[list[torch.Tensor | Failure], str | None]:
        sequences = [sequence for rows in ranges for sequence in rows.live.request.sequences[rows.start : rows.stop]]
        vectors = self._embed_ranges(
            [rows.count for rows in ranges], [*sequences, probe.token_ids] if probe else sequences
        )
        mismatch = None
        if probe is not None:
            probe_vectors = vectors.pop()
            mismatch = "it raised" if probe_vectors is None else known_answers.verify(probe, probe_vectors[0])
        return [_finite_or_failure(of_range) for of_range in vectors], mismatch

    def _embed_ranges(self, counts: list[int], sequences: Sequence[tuple[int, ...]]) -> list[torch.Tensor | None]:
        """Return the vectors of each range, and of a last sequence that no range counts. If the forward raises, each
        range is repeated alone. None stands for a range that raises even alone.
        """
        if len(sequences) > sum(counts):
            counts.append(1)
        try:
            return list(torch.split(self._model.embed(sequences), counts))
        except torch.AcceleratorError:
            raise
        except Exception:
            _log.warning("a forward of %d sequences failed; repeating it by requests", len(sequences), exc_info=True)
        vectors: list[torch.Tensor | None] = []
        start = 0
        for count in counts:
            vectors.append(self._try_embed(sequences[start : start + count]))
            start += count
        return vectors

    def _try_embed(self, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
        try:
            return self._model.embed(sequences)
        except torch.AcceleratorError:
            raise
        except Exception:
            _log.exception("a forward of one request failed")
            return None

    def _events(self, rows: RowRange[EmbeddingRequest], answer: torch.Tensor) -> list[Event]:
        request_id, counts = rows.live.request.request_id, rows.live.counts
        return [Embedded(request_id, array("f", row.tolist()).tobytes(), counts) for row in answer]


def _finite_or_failure(vectors: torch.Tensor | None) -> torch.Tensor | Failure:
    if vectors is None:
        return Internal()
    if not bool(torch.isfinite(vectors).all()):
        _log.error("vectors that are not finite")
        return Internal()
    return vectors
