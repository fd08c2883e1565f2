"""The list of a tenant's models is cached until it changes."""

import json
from typing import cast

import pytest

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.timelines import Timelines
from activator.api.lookup_routes import LIST_CACHE_SIZE, LookupRoutes
from activator.auth.authenticator import Authenticator
from activator.http.exchange import Exchange
from activator.limits.concurrency_limits import SharedCapacity
from activator.routing.request_routes import ListModels, Target
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.serving.control_messages import Feed, ModelRow, Principal, Scope
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from tests.activator.exchanges import exchange


class TrustingAuthenticator(Authenticator):
    """Authenticate every request as `caller`."""

    def __init__(self) -> None:
        self.caller = Principal(key_id="k", tenant="a", scopes=(Scope.INFER,))

    async def authenticate(self, exchange: Exchange, *scopes: Scope) -> Principal:
        return self.caller


def _model(tenant: str, model: str, *grantees: str) -> Feed:
    row = ModelRow(tenant=tenant, model=model, aliases={}, created_at_s=7, grantees=grantees)
    return Feed(revision=1, models=(row,))


async def test_model_list_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a model or a grant rebuilds the list. A key restricted to some models has its own list. At most
    LIST_CACHE_SIZE lists are kept.
    """
    made: list[object] = []
    table, who = RoutingTable(), TrustingAuthenticator()
    door = LookupRoutes(
        who, table, Timelines(), cast(ServiceClient, None), InFlightRequests(), SharedCapacity(8, "places")
    )

    def counted(value: object) -> bytes:
        made.append(value)
        return encode(value)

    monkeypatch.setattr("activator.api.lookup_routes.encode", counted)

    async def listed(tenant: str = "a", *models: str) -> list[str]:
        said: list[bytes] = []
        who.caller = Principal(key_id="k", tenant=tenant, scopes=(Scope.INFER,), models=models)
        await door.send_models(exchange(said), ListModels(Target()))
        return [each["id"] for each in json.loads(b"".join(said[1:]))["data"]]

    table.apply(_model("a", "one"))
    assert [await listed() for _ in range(3)] == [["one"]] * 3
    assert len(made) == 1
    table.apply(_model("a", "two"))
    assert [await listed() for _ in range(3)] == [["one", "two"]] * 3
    assert await listed("a", "two") == ["two"]
    assert await listed() == ["one", "two"]
    assert len(made) == 3
    table.apply(_model("b", "theirs", "a"))
    assert [await listed() for _ in range(3)] == [["one", "two", "b/theirs"]] * 3
    assert len(made) == 4
    for number in range(LIST_CACHE_SIZE):
        assert await listed(f"other{number}") == []
    made.clear()
    assert await listed("other1") == []
    assert await listed() == ["one", "two", "b/theirs"]
    assert len(made) == 1, "the oldest list was evicted"
