"""Refusals of the API server: Status objects with reason, message, details and code.

The texts are those of a recorded 1.36.2 server (`test_recorded_answers.py`).
"""

from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

ALL_REASONS: Final = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
CONTINUE_TOO_OLD: Final = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


class Refused(Exception):
    """A response that is not a success: HTTP status, body and headers."""

    def __init__(self, status: int, body: Json | str, headers: dict[str, str] | None = None) -> None:
        super().__init__(body["message"] if isinstance(body, dict) else body)
        self.status = status
        self.body = body
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Cause:
    """One fault and its field."""

    field: str
    reason: str
    message: str
    said: str = ""  # its text in the joined message, if different

    @classmethod
    def value(cls, field: str, shown: str, why: str) -> "Cause":
        return cls(field, "FieldValueInvalid", f"Invalid value: {shown}: {why}")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The object of a response: `services.serving.knative.dev "llama"`, or by its kind."""

    group: str
    plural: str
    kind: str
    name: str = ""
    details: Json = field(default_factory=dict)

    @property
    def resource(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def detailed(self, kind: str, **more: Any) -> Json:
        found = {"name": self.name, "group": self.group, "kind": kind, **more}
        return {key: value for key, value in found.items() if value}


def failure(code: int, message: str, *, reason: str | None = "", details: Json | None = None) -> Json:
    """Return a Status. `reason` None leaves it out, "" takes the code's own."""
    body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    if reason is not None:
        body["reason"] = reason or ALL_REASONS[code]
    if details is not None:
        body["details"] = details
    return body | {"code": code}


def refused(code: int, message: str, *, reason: str | None = "", details: Json | None = None) -> Refused:
    return Refused(code, failure(code, message, reason=reason, details=details))


def not_found(about: ObjectRef) -> Refused:
    return refused(404, f'{about.resource} "{about.name}" not found', details=about.detailed(about.plural))


def exists(about: ObjectRef) -> Refused:
    text = f'{about.resource} "{about.name}" already exists'
    return refused(409, text, reason="AlreadyExists", details=about.detailed(about.plural))


def modified(about: ObjectRef) -> Refused:
    """The resource version is not the stored one: another client wrote since."""
    text = (
        f'Operation cannot be fulfilled on {about.resource} "{about.name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return refused(409, text, details=about.detailed(about.plural))


def nobody(about: ObjectRef, uid: str) -> Refused:
    """The apply names a uid and no object of that name exists, so none is created (tried on 1.36)."""
    why = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
    text = f'Operation cannot be fulfilled on {about.resource} "{about.name}": {why}'
    return refused(409, text, details=about.detailed(about.plural))


def precondition(about: ObjectRef, what: str, why: str) -> Refused:
    text = f'Operation cannot be fulfilled on {about.qualified} "{about.name}": {what}. {why}'
    return refused(409, text, details=about.detailed(about.kind))


def invalid(about: ObjectRef, causes: list[Cause], *, by_resource: bool = False) -> Refused:
    """A 422 refusal. The message has each cause once, the details have all. An update names the resource, not the
    kind.
    """
    said = list(dict.fromkeys(f"{each.field}: {each.said or each.message}" for each in causes))
    shown = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    listed = [{"reason": each.reason, "message": each.message, "field": each.field} for each in causes]
    who, kind = (about.resource, about.plural) if by_resource else (about.qualified, about.kind)
    return refused(422, f'{who} "{about.name}" is invalid: {shown}', details=about.detailed(kind, causes=listed))


def options(kind: str, cause: Cause) -> Refused:
    """A parameter of the request itself is wrong."""
    return invalid(ObjectRef("meta.k8s.io", "", kind), [cause])


def unreadable(kind: str, version: str, why: str) -> Refused:
    return refused(400, f'{kind} in version "{version}" cannot be handled as a {kind}: {why}')


def denied(webhook: str, why: str) -> Refused:
    return refused(400, f'admission webhook "{webhook}" denied the request: {why}')
