"""Read and write models, versions and aliases as rows. `registry.py` decides what may be changed."""

from msgspec import structs
from sqlalchemy import Connection, delete, insert, select, update

from controlplane.audit import audit_rows
from controlplane.audit.audit_entry_policy import AuditAction, Value, changed_fields, created_fields
from controlplane.audit.audit_rows import Actor
from controlplane.db import schema
from controlplane.db.json_columns import read_column, read_enum
from controlplane.db.tenant_rows import find_tenant
from controlplane.registry.grants import load_grantees
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.names import DEFAULT_ALIAS
from kelvin.contracts.serving.control_messages import VersionRegistration
from kelvin.contracts.serving.degradation_steps import Ladder
from kelvin.contracts.wire import encode


def delete_model(connection: Connection, actor: Actor, model: Model, now_s: int) -> None:
    """Delete the model with its versions, aliases and grants, and record it for the audit."""
    for table in (schema.grants, schema.aliases, schema.versions, schema.models):  # referring rows first
        connection.execute(delete(table).where(table.c.tenant == model.tenant, table.c.model == model.model))
    versions = ", ".join(version.registration.version[:12] for version in model.versions)
    audit_rows.record(
        connection, actor, now_s, model.tenant, AuditAction.MODEL_DELETED, model.model, f"versions {versions}"
    )


def insert_version(connection: Connection, model: Model, version: Version, *, first: bool) -> None:
    """Insert a version; the `first` one with its model and alias `prod`. Raises Refused(NotFound) for the tenant."""
    registration, owner = version.registration, {"tenant": model.tenant, "model": model.model}
    find_tenant(connection, model.tenant)
    if first:
        row = {**owner, "created_at_s": model.created_at_s, "scale": encode(model.scale).decode()}
        connection.execute(insert(schema.models).values(row))
    connection.execute(
        insert(schema.versions).values(
            **owner,
            version=registration.version,
            state=str(version.state),
            fault=version.fault,
            limits=encode(registration.limits).decode(),
            architecture=registration.architecture,
            weight_bytes=registration.weight_bytes,
            total_bytes=registration.total_bytes,
            kv_bytes_per_token=registration.kv_bytes_per_token,
            max_positions=registration.max_positions,
            kind=registration.kind,
            signature=None if registration.signature is None else encode(registration.signature).decode(),
            created_at_s=version.created_at_s,
        )
    )
    if first:
        connection.execute(insert(schema.aliases).values(**owner, alias=DEFAULT_ALIAS, version=registration.version))
    record_published(connection, registration, version.created_at_s)


def set_split(connection: Connection, actor: Actor, before: Model, model: Model, now_s: int) -> None:
    """Store the split, and record it for the audit if it changed."""
    _store(connection, model, split=model.split or None)
    if before.split != model.split:
        changed = {"split": (before.split, model.split)}
        audit_rows.record(connection, actor, now_s, model.tenant, AuditAction.MODEL_SPLIT, model.model, changed=changed)


def set_prod(connection: Connection, actor: Actor, before: Model, model: Model, now_s: int) -> None:
    """Store the version that `prod` names and the split, and record it for the audit."""
    table, prod = schema.aliases, model.aliases[DEFAULT_ALIAS]
    which = (table.c.tenant == model.tenant, table.c.model == model.model, table.c.alias == DEFAULT_ALIAS)
    connection.execute(update(table).where(*which).values(version=prod))
    _store(connection, model, split=model.split or None)
    changed = changed_fields(
        {"prod": before.aliases.get(DEFAULT_ALIAS), "split": before.split}, {"prod": prod, "split": model.split}
    )
    audit_rows.record(connection, actor, now_s, model.tenant, AuditAction.MODEL_DEPLOYED, model.model, changed=changed)


def set_scale(connection: Connection, actor: Actor, before: Model, model: Model, now_s: int) -> None:
    """Store the scale settings, and record them for the audit if they changed."""
    _store(connection, model, scale=model.scale)
    if changed := changed_fields(structs.asdict(before.scale), structs.asdict(model.scale)):
        audit_rows.record(
            connection, actor, now_s, model.tenant, AuditAction.MODEL_SCALED, model.model, changed=changed
        )


def set_state(connection: Connection, version: Version) -> None:
    """Store the version's state and fault."""
    key, table = version.key, schema.versions
    connection.execute(
        update(table)
        .where(table.c.tenant == key.tenant, table.c.model == key.model, table.c.version == key.version)
        .values(state=str(version.state), fault=version.fault)
    )


def set_stops(connection: Connection, before: Model, model: Model) -> None:
    """Store when each version was stopped, if that changed."""
    table, known = schema.versions, {version.key: version.stopped_at_s for version in before.versions}
    for version in model.versions:
        key = version.key
        if version.stopped_at_s != known[key]:
            connection.execute(
                update(table)
                .where(table.c.tenant == key.tenant, table.c.model == key.model, table.c.version == key.version)
                .values(stopped_at_s=version.stopped_at_s)
            )


def record_stopped(connection: Connection, actor: Actor, model: Model, now_s: int) -> None:
    """Record for the audit that an operator stopped the model."""
    audit_rows.record(connection, actor, now_s, model.tenant, AuditAction.MODEL_STOPPED, model.model)


def record_published(connection: Connection, registration: VersionRegistration, now_s: int) -> None:
    """Record for the audit that the version can be served from now on."""
    tenant, changed = registration.tenant, created_fields(version=registration.version)
    actor = Actor(key_id=registration.pushed_by, tenant=tenant if registration.pushed_by else "", scopes=())
    action = AuditAction.VERSION_PUBLISHED
    audit_rows.record(connection, actor, now_s, tenant, action, registration.model, changed=changed)


def record_deleted(connection: Connection, actor: Actor, key: VersionKey, now_s: int) -> None:
    """Record for the audit that the version is no longer served."""
    changed = {"version": (key.version, None)}
    audit_rows.record(connection, actor, now_s, key.tenant, AuditAction.VERSION_DELETED, key.model, changed=changed)


def _store(connection: Connection, model: Model, **columns: object) -> None:
    """Store these columns of the model as JSON; None as NULL."""
    table, stored = schema.models, {name: None if v is None else encode(v).decode() for name, v in columns.items()}
    connection.execute(update(table).where(table.c.tenant == model.tenant, table.c.model == model.model).values(stored))


def set_ladder(connection: Connection, actor: Actor, before: Model, model: Model, now_s: int) -> None:
    """Store the degradation steps, and record them for the audit if they changed."""
    ladder = Ladder(steps=model.ladder, plans=model.plan_ladders)
    _store(connection, model, degradation=ladder if ladder.steps or ladder.plans else None)
    if changed := changed_fields(_ladders(before), _ladders(model)):
        audit_rows.record(
            connection, actor, now_s, model.tenant, AuditAction.MODEL_LADDER, model.model, changed=changed
        )


def _ladders(model: Model) -> dict[str, Value]:
    """Return the steps by plan, as JSON."""
    ladders = {"ladder": model.ladder} | {f"ladder of {plan}": steps for plan, steps in model.plan_ladders.items()}
    return {name: tuple(encode(rung).decode() for rung in steps) for name, steps in ladders.items()}


def load_models(connection: Connection) -> list[Model]:
    """Return all models of all tenants. Raises UnreadableColumn."""
    versions: dict[tuple[str, str], list[Version]] = {}
    for row in connection.execute(select(schema.versions).order_by(schema.versions.c.created_at_s)).mappings():
        stored, label = row["signature"], f"of version {row['tenant']}/{row['model']}@{row['version'][:12]}"
        registration = VersionRegistration(
            tenant=row["tenant"],
            model=row["model"],
            version=row["version"],
            limits=read_column(row["limits"], Limits, f"the limits {label}"),
            architecture=row["architecture"],
            weight_bytes=row["weight_bytes"],
            total_bytes=row["total_bytes"],
            kv_bytes_per_token=row["kv_bytes_per_token"],
            max_positions=row["max_positions"],
            kind=row["kind"],
            signature=None if stored is None else read_column(stored, Signature, f"the signature {label}"),
        )
        state = read_enum(row["state"], VersionState, f"the state {label}")
        version = Version(registration, row["created_at_s"], state, row["fault"], row["stopped_at_s"])
        versions.setdefault((row["tenant"], row["model"]), []).append(version)
    aliases: dict[tuple[str, str], dict[str, str]] = {}
    for row in connection.execute(select(schema.aliases)).mappings():
        aliases.setdefault((row["tenant"], row["model"]), {})[row["alias"]] = row["version"]
    grantees = load_grantees(connection)
    models = []
    for row in connection.execute(select(schema.models)).mappings():
        name, label = (row["tenant"], row["model"]), f"of model {row['tenant']}/{row['model']}"
        scale = read_column(row["scale"], ScaleSettings, f"the scale {label}")
        found = tuple(versions.get(name, ()))
        granted = tuple(grantees.get(name, ()))
        split = {} if row["split"] is None else read_column(row["split"], dict[str, int], f"the split {label}")
        stored = row["degradation"]
        ladder = Ladder(steps=()) if stored is None else read_column(stored, Ladder, f"the ladder {label}")
        models.append(
            Model(
                *name, row["created_at_s"], scale, aliases.get(name, {}), found, granted, split, ladder.steps,
                ladder.plans,
            )
        )  # fmt: skip
    return models
