"""A model that predicts, bound and ready: from a body to rows for its engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from contracts.ceiling import NO_CEILING, Ceiling
from contracts.jobs import Bind, SealAttestation
from contracts.manifest import Kind, Limits
from contracts.signature import Signature
from contracts.timeline import Span
from runtime.engine.interface import Engine, PredictionRequest
from runtime.engine.thread import EngineThread
from runtime.open_inference import PredictionAnswer, PredictionAsk, decode_prediction
from runtime.policy.schedule import OWNER
from runtime.predictor.arrays import Arrays, as_array
from runtime.serving import Encoding, Kept, Prepared

INLINE_BYTES: Final = 16_384  # larger bodies are decoded beside the loop


@dataclass(frozen=True, slots=True)
class PredictorServing:
    """Implements `serving.Served`."""

    bind: Bind
    limits: Limits
    signature: Signature
    engine: Engine
    thread: EngineThread
    spans: tuple[Span, ...]
    bytes_by_tier: Mapping[str, int]
    recorded: SealAttestation | None = None
    kept: Kept | None = None
    encoding: Encoding = field(default_factory=lambda: Encoding(INLINE_BYTES))

    def __repr__(self) -> str:
        return f"<PredictorServing {self.bind.tenant}/{self.bind.model}@{self.bind.version[:12]} {self.engine!r}>"

    @property
    def kind(self) -> Kind:
        """See `Served`, as for `prepare`."""
        return "predict"

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: Ceiling = NO_CEILING,
        tenant: str = OWNER,
    ) -> Prepared:
        ask, inputs = await self.encoding.run(tenant, len(raw), lambda: self._decode(raw))
        answer = PredictionAnswer(self.bind.model, self.bind.version, self.signature, ask)
        request = PredictionRequest(request_id=request_id, rows=ask.rows, inputs=inputs, tenant=tenant)
        return Prepared(request, answer, stream=False)

    def _decode(self, raw: bytes) -> tuple[PredictionAsk, Arrays]:
        ask = decode_prediction(raw, self.signature, self.limits.max_input_tokens)
        return ask, {each.spec.name: as_array(each.values, each.spec.datatype, each.shape) for each in ask.inputs}
