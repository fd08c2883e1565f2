"""Find the version that answers a request, and whether it still is the right one. See
`routing/policy/version_resolution.py` for aliases, splits and deploys.
"""

from activator.accounting.usage_records import UsageRecords
from activator.queue.throttler import Throttler
from activator.request.inference_request import InferenceRequest
from activator.routing.policy.request_body import token_limits_of
from activator.routing.policy.version_key import VersionKey, key_of
from activator.routing.policy.version_resolution import (
    Availability,
    ModelEntry,
    choose_version,
    find_version,
    resolve_version,
)
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND, wrong_kind_failure
from kelvin.contracts.artifacts.tensor_schema import check_schema
from kelvin.contracts.errors import BodyTooLarge, Refused
from kelvin.contracts.serving.control_messages import VersionRow


class VersionResolver:
    """Resolves the references of requests."""

    def __init__(self, table: RoutingTable, throttler: Throttler, usage: UsageRecords) -> None:
        self._table = table
        self._throttler = throttler
        self._usage = usage

    def resolve(self, request: InferenceRequest) -> VersionRow:
        """Return the version that answers. Raises Refused if it does not accept this request."""
        row = resolve_version(request.reference, request.entry, request.split_key(request.entry))
        if request.entry.meanwhile and request.reference.alias is not None:
            row = choose_version(row, request.entry, self._availability)
        request.account.version = row.version
        if request.path not in ROUTES_BY_KIND[row.kind]:
            raise Refused(wrong_kind_failure(request.reference.model, row.kind))
        if row.signature is not None:
            for schema_hash in request.schemas:
                check_schema(schema_hash, row.signature)
        if len(request.body) > row.limits.max_body_bytes:
            raise Refused(BodyTooLarge(row.limits.max_body_bytes))
        if (refusal := self._usage.refusal) is not None:  # accept no request that can't be recorded
            raise Refused(refusal)
        request.ceiling = token_limits_of(request.parsed_body, request.tenant_limits)
        return row

    def try_update(self, request: InferenceRequest) -> bool:
        """Update the model's entry. Return whether the reference names another version now. False once the client has
        the head.
        """
        tenant, model = request.account.principal.tenant, request.entry
        entry = self._table.find_callable_model(tenant, model.tenant, model.model)
        if entry is None or request.exchange.has_started:
            return False
        if _version_in(entry, request) in (None, _version_in(request.entry, request)):
            return False
        request.entry = entry
        return True

    def is_current(self, request: InferenceRequest, key: VersionKey) -> bool:
        """Return whether the request still goes to that version: it exists, and the reference still names it. Once the
        client has the head, the version only has to exist.
        """
        tenant, model = request.account.principal.tenant, request.entry
        entry = self._table.find_callable_model(tenant, model.tenant, model.model)
        if entry is model:
            return True
        if entry is None or find_version(entry, key.version) is None:
            return False
        return request.exchange.has_started or _version_in(entry, request) == _version_in(request.entry, request)

    def _availability(self, row: VersionRow) -> Availability:
        return self._throttler.availability(key_of(row))


def _version_in(entry: ModelEntry, request: InferenceRequest) -> str | None:
    """Return the version that the request's reference names in `entry`, or None."""
    try:
        return resolve_version(request.reference, entry, request.split_key(entry)).version
    except Refused:
        return None
