"""Models, versions and aliases as rows of the database. What may be done to them is the registry's to say."""

from sqlalchemy import Connection, delete, insert, select, update

from contracts.control import Principal, VersionRegistration
from contracts.ladder import Rung
from contracts.manifest import Limits
from contracts.names import DEFAULT_ALIAS
from contracts.signature import Signature
from contracts.wire import decode, encode
from controlplane import audit, schema
from controlplane.audit import Action
from controlplane.facts import Model, ScaleSettings, Version
from controlplane.grants import load_grantees
from controlplane.policy.lifecycle import VersionState
from controlplane.tenant_rows import find_tenant


def scale_columns(scale: ScaleSettings) -> dict[str, float | int | str | None]:
    """As a row of models has them."""
    return {
        "min_replicas": scale.min,
        "max_replicas": scale.max,
        "target": scale.target,
        "window_s": scale.window_s,
        "grace_s": scale.grace_s,
        "idle": scale.idle,
        "wait_price": scale.wait_price,
    }


def delete_model(connection: Connection, by: Principal, model: Model, now_s: int) -> None:
    """With its versions, aliases and grants, recorded for the audit."""
    for table in (schema.grants, schema.aliases, schema.versions, schema.models):  # what refers first
        connection.execute(delete(table).where(table.c.tenant == model.tenant, table.c.model == model.model))
    versions = ", ".join(version.registration.version[:12] for version in model.versions)
    audit.record(connection, by, now_s, model.tenant, Action.MODEL_DELETED, model.model, f"versions {versions}")


def insert_version(connection: Connection, model: Model, version: Version, *, first: bool) -> None:
    """And, with the `first` one, its model and the alias that names it. Raises Refused(NotFound): its tenant."""
    of, owner = version.registration, {"tenant": model.tenant, "model": model.model}
    find_tenant(connection, model.tenant)
    if first:
        row = {**owner, "created_at_s": model.created_at_s, **scale_columns(model.scale)}
        connection.execute(insert(schema.models).values(row))
    connection.execute(
        insert(schema.versions).values(
            **owner,
            version=of.version,
            state=str(version.state),
            fault=version.fault,
            limits=encode(of.limits).decode(),
            architecture=of.architecture,
            weight_bytes=of.weight_bytes,
            total_bytes=of.total_bytes,
            kv_bytes_per_token=of.kv_bytes_per_token,
            max_positions=of.max_positions,
            kind=of.kind,
            signature=None if of.signature is None else encode(of.signature).decode(),
            created_at_s=version.created_at_s,
        )
    )
    if first:
        connection.execute(insert(schema.aliases).values(**owner, alias=DEFAULT_ALIAS, version=of.version))


def set_split(connection: Connection, model: Model) -> None:
    """As the model has it."""
    table = schema.models
    stored = encode(model.split).decode() if model.split else None
    connection.execute(
        update(table).where(table.c.tenant == model.tenant, table.c.model == model.model).values(split=stored)
    )


def set_ladder(connection: Connection, model: Model) -> None:
    """As the model has it."""
    table = schema.models
    stored = encode(model.ladder).decode() if model.ladder else None
    connection.execute(
        update(table).where(table.c.tenant == model.tenant, table.c.model == model.model).values(ladder=stored)
    )


def set_prod(connection: Connection, model: Model) -> None:
    """The version that `prod` names, and what is split of what it is asked."""
    table = schema.aliases
    which = (table.c.tenant == model.tenant, table.c.model == model.model, table.c.alias == DEFAULT_ALIAS)
    connection.execute(update(table).where(*which).values(version=model.aliases[DEFAULT_ALIAS]))
    set_split(connection, model)


def load_models(connection: Connection) -> list[Model]:
    """All of all tenants."""
    versions: dict[tuple[str, str], list[Version]] = {}
    for row in connection.execute(select(schema.versions).order_by(schema.versions.c.created_at_s)).mappings():
        stored = row["signature"]
        registration = VersionRegistration(
            tenant=row["tenant"],
            model=row["model"],
            version=row["version"],
            limits=decode(row["limits"], Limits, what="stored limits"),
            architecture=row["architecture"],
            weight_bytes=row["weight_bytes"],
            total_bytes=row["total_bytes"],
            kv_bytes_per_token=row["kv_bytes_per_token"],
            max_positions=row["max_positions"],
            kind=row["kind"],
            signature=None if stored is None else decode(stored, Signature, what="a stored signature"),
        )
        version = Version(registration, row["created_at_s"], VersionState(row["state"]), row["fault"])
        versions.setdefault((row["tenant"], row["model"]), []).append(version)
    aliases: dict[tuple[str, str], dict[str, str]] = {}
    for row in connection.execute(select(schema.aliases)).mappings():
        aliases.setdefault((row["tenant"], row["model"]), {})[row["alias"]] = row["version"]
    grantees = load_grantees(connection)
    models = []
    for row in connection.execute(select(schema.models)).mappings():
        name = (row["tenant"], row["model"])
        scale = ScaleSettings(
            min=row["min_replicas"],
            max=row["max_replicas"],
            target=row["target"],
            window_s=row["window_s"],
            grace_s=row["grace_s"],
            idle=row["idle"],
            wait_price=row["wait_price"],
        )
        found = tuple(versions.get(name, ()))
        granted = tuple(grantees.get(name, ()))
        split = {} if row["split"] is None else decode(row["split"], dict[str, int], what="a stored split")
        ladder = () if row["ladder"] is None else decode(row["ladder"], tuple[Rung, ...], what="a stored ladder")
        models.append(Model(*name, row["created_at_s"], scale, aliases.get(name, {}), found, granted, split, ladder))
    return models
