"""What can be asked about models and requests without a model: OpenAI's model list, and a request's timeline."""

import msgspec

from activator.authenticate import authenticate
from activator.exchange import Exchange
from activator.policy.traffic import ModelEntry, resolve
from activator.routes import ListModels, ShowTimeline
from activator.table import Table
from activator.timelines import Timelines
from contracts.control import Scope, TimelineAnswer
from contracts.errors import ModelNotFound, NotFound, Refused, Unavailable
from contracts.names import parse_reference
from contracts.problem import code_of
from contracts.wire import encode
from service.client import ServiceClient

TIMEOUT_S = 5.0
_JSON = b"application/json"


class _Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    object: str = "model"


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]
    object: str = "list"


class Lists:
    """Serves `/v1/models`, `/v1/models/M` and `/v1/requests/ID/timeline`."""

    def __init__(self, table: Table, timelines: Timelines, control: ServiceClient) -> None:
        self._table = table
        self._timelines = timelines
        self._control = control

    async def models(self, exchange: Exchange, asked: ListModels) -> None:
        """The caller's models, or one."""
        tenant = self._tenant(exchange, asked.target.tenant, asked.model or asked.target.model or "")
        if asked.model is not None:
            body = encode(_model(self._find(tenant, asked.model), asked.model))
        elif asked.target.model is not None:
            body = encode(_Models((_model(self._find(tenant, asked.target.model), asked.target.model),)))
        else:
            body = encode(_Models(tuple(_model(entry, entry.model) for entry in self._table.models(tenant))))
        await _answer(exchange, body)

    async def timeline(self, exchange: Exchange, asked: ShowTimeline) -> None:
        """How a request of the caller's tenant went; recent ones are known here, older ones to the control plane."""
        tenant = self._tenant(exchange, asked.target.tenant, asked.target.model or "")
        found = self._timelines.find(tenant, asked.request_id)
        if found is None:
            path = f"/internal/v1/requests/{asked.request_id}/timeline?tenant={tenant}"
            try:
                found = await self._control.call("GET", path, TimelineAnswer, timeout_s=TIMEOUT_S)
            except Refused as refused:
                if code_of(refused.failure) == Unavailable.code:
                    raise
                raise Refused(NotFound("request", asked.request_id)) from refused
        await _answer(exchange, encode(found))

    def _tenant(self, exchange: Exchange, in_url: str | None, model: str) -> str:
        principal = authenticate(self._table, exchange.header(b"authorization"), Scope.INFER)
        if in_url not in (None, principal.tenant):
            raise Refused(ModelNotFound(model))
        return principal.tenant

    def _find(self, tenant: str, name: str) -> ModelEntry:
        reference = parse_reference(name)
        entry = self._table.model(tenant, reference.model)
        if entry is None:
            raise Refused(ModelNotFound(name))
        resolve(reference, entry)
        return entry


def _model(entry: ModelEntry, name: str) -> _Model:
    return _Model(name, entry.created_at_s, entry.tenant)


async def _answer(exchange: Exchange, body: bytes) -> None:
    await exchange.read_body(0, TIMEOUT_S)
    await exchange.respond(200, _JSON, body)
