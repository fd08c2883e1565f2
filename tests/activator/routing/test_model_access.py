"""Which models a caller may call: its own and granted ones. Any other model is not found."""

import pytest

from activator.routing.routing_table import RoutingTable, authorize_model
from kelvin.contracts.errors import InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.names import parse_address
from kelvin.contracts.serving.control_messages import Feed, ModelRow, Principal, Scope
from tests.activator.control import VERSION, snapshot, version_row


def _table() -> RoutingTable:
    """Return a table in which `default` lets `stranger` call m and has another model. `stranger` has its own m."""
    table = RoutingTable()
    table.apply(snapshot())

    def model(tenant: str, name: str, *grantees: str) -> ModelRow:
        return ModelRow(tenant=tenant, model=name, aliases={"prod": VERSION}, created_at_s=1, grantees=grantees)

    rows = (model("default", "m", "stranger"), model("default", "secret"), model("stranger", "m"))
    versions = tuple(version_row(row.tenant, row.model, VERSION) for row in rows)
    table.apply(Feed(revision=2, models=rows, versions=versions))
    return table


def _caller(tenant: str, *models: str) -> Principal:
    return Principal(key_id="k", tenant=tenant, scopes=(Scope.INFER,), models=models)


@pytest.mark.parametrize(
    ("caller", "in_url", "named", "want"),
    [
        pytest.param(_caller("stranger"), None, "m", "stranger", id="a bare name is the caller's own"),
        pytest.param(_caller("stranger"), None, "default/m", "default", id="the owner in the name"),
        pytest.param(_caller("stranger"), "default", "m", "default", id="the owner in the URL"),
        pytest.param(_caller("stranger"), "default", "default/m@prod", "default", id="in both"),
        pytest.param(_caller("stranger"), "stranger", "m", "stranger", id="the caller in the URL"),
        pytest.param(_caller("stranger"), None, "stranger/m", "stranger", id="the caller in the name"),
        pytest.param(_caller("stranger", "default/m"), None, "default/m", "default", id="a key for the granted one"),
        pytest.param(_caller("stranger", "m"), None, "default/m", ModelNotFound, id="a key for the own one alone"),
        pytest.param(_caller("stranger", "default/m"), None, "m", ModelNotFound, id="a key for the granted one alone"),
        pytest.param(_caller("stranger"), None, "default/secret", ModelNotFound, id="a model that was not granted"),
        pytest.param(_caller("stranger"), None, "default/nothing", ModelNotFound, id="an unknown model"),
        pytest.param(_caller("stranger"), None, "nobody/m", ModelNotFound, id="an unknown owner"),
        pytest.param(_caller("third"), None, "default/m", ModelNotFound, id="granted to another"),
        pytest.param(_caller("default"), None, "stranger/m", ModelNotFound, id="a grant is one way"),
        pytest.param(_caller("stranger"), "stranger", "default/m", InvalidRequest, id="two tenants"),
    ],
)
def test_caller_reaches_own_and_granted_models(
    caller: Principal, in_url: str | None, named: str, want: str | type
) -> None:
    """The result is the owner of the model, or the refusal."""
    reference = parse_address(named)
    if isinstance(want, str):
        entry = authorize_model(_table(), caller, in_url, reference)
        assert (entry.tenant, entry.model) == (want, "m")
        return
    with pytest.raises(Refused) as refused:
        authorize_model(_table(), caller, in_url, reference)
    assert isinstance(refused.value.failure, want)


@pytest.mark.parametrize("named", ["secret", "nothing"])
def test_unauthorized_model_looks_like_a_missing_one(named: str) -> None:
    """The refusal differs only by the name that the caller wrote."""
    with pytest.raises(Refused) as refused:
        authorize_model(_table(), _caller("stranger"), None, parse_address(f"default/{named}"))
    assert refused.value.failure == ModelNotFound(f"default/{named}@prod")
