"""What the control plane knows of models and versions, as frozen facts. Storing them is `registry`'s work."""

from dataclasses import dataclass, field

from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.serving.control_messages import ModelRow, VersionRegistration, VersionRow
from kelvin.contracts.serving.degradation_steps import DegradationStep


@dataclass(frozen=True, slots=True, order=True)
class VersionKey:
    """A version of a model of a tenant: the unit that is scaled. The same bytes under two models are two of them."""

    tenant: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model}@{self.version[:12]}"


@dataclass(frozen=True, slots=True)
class Version:
    """A published version of a model and how it fares. `fault` is the failure's code while it is faulty. A deletion
    keeps it if chunks can show the fault.

    `stopped_at_s` is when an operator stopped it. Until it is asked for, deployed or given a minimum again, the minimum
    of its model does not hold for it.
    """

    registration: VersionRegistration
    created_at_s: int
    state: VersionState
    fault: str | None = None
    stopped_at_s: int | None = None

    @property
    def key(self) -> VersionKey:
        """What it is scaled under."""
        return VersionKey(self.registration.tenant, self.registration.model, self.registration.version)

    @property
    def is_deleted(self) -> bool:
        """Whether it is only remembered."""
        return self.state is VersionState.DELETED

    def row(self) -> VersionRow:
        """What activators know of it."""
        of = self.registration
        return VersionRow(
            tenant=of.tenant,
            model=of.model,
            version=of.version,
            limits=of.limits,
            created_at_s=self.created_at_s,
            kind=of.kind,
            signature=of.signature,
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
    split: dict[str, int] = field(default_factory=dict)  # versions that share what `prod` is asked, by weight
    ladder: tuple[DegradationStep, ...] = ()  # what it gives up before it refuses
    plan_ladders: dict[str, tuple[DegradationStep, ...]] = field(
        default_factory=dict
    )  # in its place, by the plan of who asks
    meanwhile: dict[str, str] = field(default_factory=dict)  # as in `ModelRow`: by what runs, and kept nowhere

    @property
    def named(self) -> frozenset[str]:
        """Versions that are asked for without their digests."""
        return frozenset((*self.aliases.values(), *self.split))

    @property
    def live_versions(self) -> tuple[Version, ...]:
        """Versions that are not deleted."""
        return tuple(version for version in self.versions if not version.is_deleted)

    def aliases_of(self, version: str) -> tuple[str, ...]:
        """Aliases that name the version of that full digest, sorted."""
        return tuple(sorted(alias for alias, named in self.aliases.items() if named == version))

    def version(self, version: str) -> Version | None:
        """The version of that full digest."""
        return next((found for found in self.versions if found.registration.version == version), None)

    def row(self) -> ModelRow:
        """What activators know of it."""
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
