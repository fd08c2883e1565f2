"""Which model a caller means, and whether it may call it. Which version answers is `policy/traffic`'s to say."""

from activator.policy.traffic import ModelEntry
from activator.table import Table
from contracts.control import Principal
from contracts.errors import InvalidRequest, ModelNotFound, Refused
from contracts.names import ModelReference


def reach(table: Table, caller: Principal, in_url: str | None, reference: ModelReference) -> ModelEntry:
    """The own model, or another tenant's that was granted; `in_url` is the tenant that path or host names.

    Raises Refused: ModelNotFound alike for what is not there, not granted, granted no more, or not the key's;
    InvalidRequest where URL and reference name different tenants.
    """
    if in_url is not None and reference.owner not in (None, in_url):
        raise Refused(InvalidRequest("model", f"'{reference}'", f"the URL names the tenant '{in_url[:63]}'"))
    entry = table.callable(caller.tenant, reference.owner or in_url or caller.tenant, reference.model)
    if entry is None or not caller.may_call(entry.name_for(caller.tenant)):
        raise Refused(ModelNotFound(str(reference)))
    return entry
