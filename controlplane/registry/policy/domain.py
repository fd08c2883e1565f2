"""Define models and versions as frozen types. `registry.py` stores them."""

from dataclasses import dataclass, field

from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.serving.control_messages import ModelRow, VersionRegistration, VersionRow
from kelvin.contracts.serving.degradation_steps import DegradationStep


@dataclass(frozen=True, slots=True, order=True)
class VersionKey:
    """A version of a tenant's model: the unit of scaling. The same bytes under two models have two keys."""

    tenant: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model}@{self.version[:12]}"


@dataclass(frozen=True, slots=True)
class Version:
    """A published version of a model and its state. `fault` is the failure's code while it is faulty. Deletion keeps
    the fault if it is about chunks.

    `stopped_at_s` is when an operator stopped the version. Until it is requested, deployed or given a minimum again,
    the minimum of its model does not apply to it.
    """

    registration: VersionRegistration
    created_at_s: int
    state: VersionState
    fault: str | None = None
    stopped_at_s: int | None = None

    @property
    def key(self) -> VersionKey:
        """The key under which it is scaled."""
        return VersionKey(self.registration.tenant, self.registration.model, self.registration.version)

    @property
    def is_deleted(self) -> bool:
        """Whether the version is deleted and only its row is left."""
        return self.state is VersionState.DELETED

    def row(self) -> VersionRow:
        """Return the version as activators know it."""
        registration = self.registration
        return VersionRow(
            tenant=registration.tenant,
            model=registration.model,
            version=registration.version,
            limits=registration.limits,
            created_at_s=self.created_at_s,
            kind=registration.kind,
            signature=registration.signature,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its aliases and versions, the oldest first."""

    tenant: str
    model: str
    created_at_s: int
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    aliases: dict[str, str] = field(default_factory=dict)  # alias -> version; replaced, never changed in place
    versions: tuple[Version, ...] = ()
    grantees: tuple[str, ...] = ()  # other tenants that may call it, in order
    split: dict[str, int] = field(default_factory=dict)  # versions that share requests to `prod`, by weight
    ladder: tuple[DegradationStep, ...] = ()  # degradation steps, tried before a request is refused
    plan_ladders: dict[str, tuple[DegradationStep, ...]] = field(default_factory=dict)  # by plan, instead of `ladder`
    meanwhile: dict[str, str] = field(default_factory=dict)  # as in `ModelRow`; depends on what runs, is not stored

    @property
    def named(self) -> frozenset[str]:
        """Versions that can be requested without their digests."""
        return frozenset((*self.aliases.values(), *self.split))

    @property
    def live_versions(self) -> tuple[Version, ...]:
        """Versions that are not deleted."""
        return tuple(version for version in self.versions if not version.is_deleted)

    def aliases_of(self, version: str) -> tuple[str, ...]:
        """Return the aliases of the version with that full digest, sorted."""
        return tuple(sorted(alias for alias, named in self.aliases.items() if named == version))

    def version(self, version: str) -> Version | None:
        """Return the version with that full digest, deleted ones included; None if unknown."""
        return next((found for found in self.versions if found.registration.version == version), None)

    def row(self) -> ModelRow:
        """Return the model as activators know it."""
        return ModelRow(
            tenant=self.tenant,
            model=self.model,
            aliases=self.aliases,
            created_at_s=self.created_at_s,
            grantees=self.grantees,
            split=self.split,
            ladder=self.ladder,
            plan_ladders=self.plan_ladders,
            backlog_s=self.scale.backlog_s,
            meanwhile=self.meanwhile,
        )
