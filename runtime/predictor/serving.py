"""A predictor that is bound and ready, and how it makes rows for its engine out of a body."""

from dataclasses import dataclass, field
from typing import Final

from contracts.ceiling import NO_CEILING, Ceiling
from contracts.signature import Signature
from runtime.engine.interface import PredictionRequest
from runtime.open_inference import PredictionAnswer, PredictionAsk, decode_prediction
from runtime.policy.schedule import OWNER
from runtime.predictor.arrays import Arrays, as_array
from runtime.serving import Encoding, Prepared, Served

INLINE_BYTES: Final = 16_384  # larger bodies are decoded beside the loop


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PredictorServing(Served):
    """A model that predicts, by the Open Inference Protocol."""

    kind = "predict"
    signature: Signature
    encoding: Encoding = field(default_factory=lambda: Encoding(INLINE_BYTES))

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: Ceiling = NO_CEILING,
        tenant: str = OWNER,
    ) -> Prepared:
        """See `Served`."""
        ask, inputs = await self.encoding.run(tenant, len(raw), lambda: self._decode(raw))
        answer = PredictionAnswer(self.bind.model, self.bind.version, self.signature, ask)
        request = PredictionRequest(request_id=request_id, rows=ask.rows, inputs=inputs, tenant=tenant)
        return Prepared(request, answer, stream=False)

    def _decode(self, raw: bytes) -> tuple[PredictionAsk, Arrays]:
        ask = decode_prediction(raw, self.signature, self.limits.max_input_tokens)
        return ask, {each.spec.name: as_array(each.values, each.spec.datatype, each.shape) for each in ask.inputs}
