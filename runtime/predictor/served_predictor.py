"""A predictor that is ready, and how a request body becomes rows for its engine."""

from dataclasses import dataclass, field
from typing import Final

from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits
from runtime.drivers.interface import OWNER_TENANT, PredictionRequest
from runtime.predictor.arrays import Arrays, as_array
from runtime.surface.encoding_queue import EncodingQueue
from runtime.surface.open_inference_codec import PredictionAnswerBuilder, PredictionCall, decode_prediction
from runtime.surface.served_version import PreparedRequest, ServedVersion

INLINE_BYTES: Final = 16_384  # larger bodies are decoded in a thread


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedPredictor(ServedVersion):
    """A served predictor, which answers requests of the Open Inference Protocol."""

    kind = "predict"
    signature: Signature
    encoding: EncodingQueue = field(default_factory=lambda: EncodingQueue(INLINE_BYTES))

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: TokenLimits = NO_TOKEN_LIMITS,
        tenant: str = OWNER_TENANT,
    ) -> PreparedRequest:
        """Decode a prediction request, as `ServedVersion.prepare` specifies."""
        call, inputs = await self.encoding.run(tenant, len(raw), lambda: self._decode(raw))
        answer = PredictionAnswerBuilder(self.bind.model, self.bind.version, self.signature, call)
        request = PredictionRequest(request_id=request_id, rows=call.rows, inputs=inputs, tenant=tenant)
        return PreparedRequest(request, answer, stream=False)

    def _decode(self, raw: bytes) -> tuple[PredictionCall, Arrays]:
        call = decode_prediction(raw, self.signature, self.limits.max_input_tokens)
        return call, {each.spec.name: as_array(each.values, each.spec.datatype, each.shape) for each in call.inputs}
