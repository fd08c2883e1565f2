"""Models and versions as the feed tells activators of them."""

from contracts.control import ModelRow, VersionRow
from controlplane.facts import Model, Version


def model_row(model: Model) -> ModelRow:
    """As the feed tells of it."""
    return ModelRow(
        tenant=model.tenant,
        model=model.model,
        aliases=model.aliases,
        created_at_s=model.created_at_s,
        grantees=model.grantees,
        split=model.split,
        ladder=model.ladder,
        plan_ladders=model.plan_ladders,
        backlog_s=model.scale.backlog_s,
        meanwhile=model.meanwhile,
    )


def version_row(version: Version) -> VersionRow:
    """As the feed tells of it."""
    of = version.registration
    return VersionRow(
        tenant=of.tenant,
        model=of.model,
        version=of.version,
        limits=of.limits,
        created_at_s=version.created_at_s,
        kind=of.kind,
        signature=of.signature,
    )
