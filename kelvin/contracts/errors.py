"""All ways in which Kelvin refuses a request: a closed set of facts, carried by one exception, `Refused`.

A failure knows its code, its HTTP status, and whether and when a retry may help. `problem` encodes it for the wire.
Failures of artifacts are in `artifact_errors`, failures of inference traffic in `traffic_errors`.
"""

from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Failure:
    """Base of the closed set. A subclass sets the class variables, or overrides `message` if it needs logic. A template
    names fields: "{limit_bytes} bytes". `retry_after` is in seconds, or names the field that holds them.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    retry_after: ClassVar[float | str | None] = None
    template: ClassVar[str] = "internal error"
    param_template: ClassVar[str | None] = None

    @property
    def message(self) -> str:
        """Return one sentence for the caller. It never contains a secret, a path or another tenant's name."""
        return self._filled(self.template)

    @property
    def param(self) -> str | None:
        """Return the request field at fault, if there is one."""
        return None if self.param_template is None else self._filled(self.param_template)

    @property
    def retry_after_s(self) -> float | None:
        """Return the seconds after which a retry is worthwhile, if known."""
        return getattr(self, self.retry_after) if isinstance(self.retry_after, str) else self.retry_after

    def _filled(self, template: str) -> str:
        return template.format(**{field.name: getattr(self, field.name) for field in fields(self)})


class Refused(Exception):
    """Exception that carries a `Failure`. Mutable, because tracebacks need that; the failure is not."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure
        self.encoded_tokens = 0  # prompt tokens that a replica encoded before it refused the request

    def __str__(self) -> str:
        return f"{self.failure.code}: {self.failure.message}"


@dataclass(frozen=True, slots=True)
class Internal(Failure):
    """A defect in Kelvin. Details are in the log under the request id."""


@dataclass(frozen=True, slots=True)
class Unauthenticated(Failure):
    """The key is missing, unknown, expired or revoked. The caller is not told which."""

    code, status = "invalid_api_key", 401
    template = "missing or invalid API key"


@dataclass(frozen=True, slots=True)
class Forbidden(Failure):
    """The key lacks a scope. If any one of several scopes is enough, `others` has all but `scope`."""

    scope: str
    others: tuple[str, ...] = ()
    code, status = "insufficient_scope", 403

    @property
    def message(self) -> str:
        scopes = "', '".join((self.scope, *self.others))
        return f"this key has none of the scopes '{scopes}'" if self.others else f"this key lacks the scope '{scopes}'"


@dataclass(frozen=True, slots=True)
class TenantSuspended(Failure):
    """The key is valid, but its tenant is suspended."""

    code, status = "tenant_suspended", 403
    template = "this tenant is suspended"


@dataclass(frozen=True, slots=True)
class NotFound(Failure):
    """The object is unknown or belongs to another tenant. The two look the same."""

    kind: str
    name: str
    hint: str = ""  # a likely alternative, if there is one
    code, status = "not_found", 404

    @property
    def message(self) -> str:
        missing = f"{self.kind} '{self.name}' does not exist"
        return f"{missing}: {self.hint}" if self.hint else missing


@dataclass(frozen=True, slots=True)
class ModelNotFound(Failure):
    """The model reference names nothing that this tenant owns or was granted."""

    name: str
    code, status = "model_not_found", 404
    template = "the model '{name}' does not exist"
    param_template = "model"


@dataclass(frozen=True, slots=True)
class MethodNotAllowed(Failure):
    """The path exists but does not allow the method. `allowed` lists the methods that it allows."""

    method: str
    allowed: tuple[str, ...] = ()
    code, status = "method_not_allowed", 405
    template = "method {method} is not allowed here"


@dataclass(frozen=True, slots=True)
class InvalidRequest(Failure):
    """A value breaks a rule. The message names both."""

    field: str
    value: str
    rule: str
    code, status = "invalid_request", 400
    template = "{field}={value}: {rule}"
    param_template = "{field}"


@dataclass(frozen=True, slots=True)
class LimitExceeded(Failure):
    """A value is over a hard limit of the version or tenant. Found before compute, except for a large response."""

    field: str
    value: int
    limit: int
    unit: str
    whose: str = "this model"
    code, status = "context_length_exceeded", 400
    param_template = "{field}"

    @property
    def message(self) -> str:
        shown = str(self.value)[:40]  # a caller may send thousands of digits
        return f"{self.field} is {shown} {self.unit}; {self.whose} allows at most {self.limit}"


@dataclass(frozen=True, slots=True)
class SchemaMismatch(Failure):
    """The caller expects another schema than the version's. Nothing is computed."""

    given: str
    wanted: str
    code, status = "schema_mismatch", 400
    template = "schema_hash={given}: this version's schema is {wanted}"
    param_template = "schema_hash"


@dataclass(frozen=True, slots=True)
class BodyTooLarge(Failure):
    """The request body is over the limit of the endpoint."""

    limit_bytes: int
    code, status = "request_too_large", 413
    template = "the request body is larger than {limit_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Conflict(Failure):
    """The current state does not allow the operation."""

    what: str
    rule: str
    code, status = "conflict", 409
    template = "{what}: {rule}"


@dataclass(frozen=True, slots=True)
class OneMachineOnly(Failure):
    """The operation does not exist on a cluster; `instead` names what to do there."""

    what: str
    instead: str
    code, status = "one_machine_only", 501
    template = "{what}: only where one machine runs the versions; on a cluster {instead}"


@dataclass(frozen=True, slots=True)
class Unavailable(Failure):
    """A dependency of Kelvin does not answer."""

    dependency: str
    after_s: float = 1.0
    code, status, retryable, retry_after = "unavailable", 503, True, "after_s"
    template = "{dependency} is not available"


@dataclass(frozen=True, slots=True)
class CapacityExceeded(Failure):
    """The request can never fit, so waiting does not help."""

    what: str
    need: int
    have: int
    code, status = "capacity_exceeded", 507

    @property
    def message(self) -> str:
        if self.have <= 0:
            return f"{self.what}: none are left; free some, then try again"
        return f"{self.what}: needs {self.need}, has {self.have}"


@dataclass(frozen=True, slots=True)
class RemoteFailure(Failure):
    """A failure that another Kelvin process reported. It is encoded as it would be in that process."""

    remote_code: str
    remote_status: int
    remote_message: str
    remote_param: str | None = None
    remote_retryable: bool = False
    remote_retry_after_s: float | None = None
    retry_after = "remote_retry_after_s"
    template = "{remote_message}"

    @property
    def code(self) -> str:  # type: ignore[override]
        return self.remote_code

    @property
    def status(self) -> int:  # type: ignore[override]
        return self.remote_status

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.remote_retryable

    @property
    def param(self) -> str | None:
        return self.remote_param
