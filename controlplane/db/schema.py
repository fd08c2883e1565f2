"""Define the control plane's tables, except the ledger's (`ledger_schema.py`). `migrations.py` creates them.

Times are whole seconds of wall clock since 1970.
"""

from sqlalchemy import BigInteger, Column, ForeignKeyConstraint, Integer, MetaData, String, Table, Text

metadata = MetaData()

tenants = Table(
    "tenants",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("created_at_s", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),  # a `TenantState`; a deleted tenant keeps its row and name
    Column("limits", Text, nullable=False, server_default="{}"),  # JSON of `TenantLimits`
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("tenant", String(63), nullable=False),
    Column("secret_sha256", String(64), nullable=False),  # of the whole text of the key
    Column("scopes", Text, nullable=False),  # space-separated
    Column("created_at_s", BigInteger, nullable=False),
    Column("name", String(63), nullable=False),
    Column("models", Text, nullable=False),  # space-separated; empty: all
    Column("expires_at_s", BigInteger, nullable=True),
    Column("revoked_at_s", BigInteger, nullable=True),
    Column("last_used_at_s", BigInteger, nullable=True),
    Column("successor", String(12), nullable=True),  # the key that it was rotated to
    ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
)

# Audit entries. Rows are only added. Triggers refuse other changes, except emptying an expired body.
audit = Table(
    "audit",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at_s", BigInteger, nullable=False),
    Column("tenant", String(63), nullable=False),  # empty: the installation itself
    Column("actor_tenant", String(63), nullable=False),
    Column("actor", String(12), nullable=False),  # the key that asked; empty: the installation itself
    Column("action", String(32), nullable=False),
    Column("subject", String(63), nullable=False),  # a key's id, the tenant, a model
    Column("detail", Text, nullable=False),
    Column("changed", Text, nullable=False, server_default="{}"),  # JSON: name -> [what it was, what it is]
    Column("request_id", String(64), nullable=False, server_default=""),
    Column("salt", String(32), nullable=False, server_default=""),
    Column("window_name", String(16), nullable=False, server_default=""),
    Column("link", BigInteger, nullable=False, server_default="0"),  # 1, 2, 3, ... within its tenant
    Column("digest", String(64), nullable=False, server_default=""),  # of its body
    Column("chain", String(64), nullable=False, server_default=""),  # of this entry and all before it
    Column("expired_at_s", BigInteger, nullable=True),  # when its body was emptied
)

# The end of each tenant's chain.
audit_chains = Table(
    "audit_chains",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("links", BigInteger, nullable=False),
    Column("chain", String(64), nullable=False),
)

# Retention windows that were set. Those of the tenant "" hold for every tenant without its own.
audit_windows = Table(
    "audit_windows",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("window_name", String(16), primary_key=True),
    Column("days", Integer, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("model", String(63), primary_key=True),
    Column("created_at_s", BigInteger, nullable=False),
    Column("scale", Text, nullable=False, server_default="{}"),  # JSON of policy.scale_settings.ScaleSettings
    Column("split", Text, nullable=True),  # JSON: version -> weight; NULL: requests to `prod` are not split
    Column("degradation", Text, nullable=True),  # JSON of kelvin.contracts.serving.degradation_steps.Ladder; NULL: none
    ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
)

versions = Table(
    "versions",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("model", String(63), primary_key=True),
    Column("version", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("fault", String(64), nullable=True),  # the failure's code while the state is faulty
    Column("limits", Text, nullable=False),  # JSON of kelvin.contracts.artifacts.manifest.Limits
    Column("architecture", Text, nullable=False),
    Column("weight_bytes", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),
    Column("kv_bytes_per_token", BigInteger, nullable=False),
    Column("max_positions", BigInteger, nullable=False),
    Column("created_at_s", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False, server_default="generate"),
    Column("signature", Text, nullable=True),  # JSON of a `tensor_schema.Signature`, for models that predict
    Column("stopped_at_s", BigInteger, nullable=True),  # by an operator; NULL: not stopped, or in use again
    ForeignKeyConstraint(["tenant", "model"], ["models.tenant", "models.model"]),
)

# Which other tenants may call a model. A grant is deleted with the model, and with either tenant.
grants = Table(
    "grants",
    metadata,
    Column("tenant", String(63), primary_key=True),  # owner of the model
    Column("model", String(63), primary_key=True),
    Column("grantee", String(63), primary_key=True),
    Column("created_at_s", BigInteger, nullable=False),
    ForeignKeyConstraint(["tenant", "model"], ["models.tenant", "models.model"]),
    ForeignKeyConstraint(["grantee"], ["tenants.tenant"]),
)

aliases = Table(
    "aliases",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("model", String(63), primary_key=True),
    Column("alias", String(63), primary_key=True),
    Column("version", String(64), nullable=False),
    ForeignKeyConstraint(["tenant", "model", "version"], ["versions.tenant", "versions.model", "versions.version"]),
)
