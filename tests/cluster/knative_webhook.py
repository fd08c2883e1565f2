"""Knative's admission webhooks, as far as they are recorded: what they default, refuse and warn of.

Recorded in webhook_defaults, webhook_validation, webhook_updates, feature_flags; the code is knative/serving's 98e5ef9.
Faults are sorted and merged as knative.dev/pkg's FieldError prints them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.cluster.answers import Json, Refused, denied
from tests.cluster.kinds import Kind
from tests.cluster.knative_annotations import Fault, of_autoscaler, of_service, of_template
from tests.cluster.knative_defaults import AUTOSCALING, CREATOR, MODIFIER, OWNED, SERVING, defaulted, signed
from tests.cluster.knative_dry_run import dry_run_pod
from tests.cluster.knative_rules import Rules, insecure

WEBHOOK: Final = "validation.webhook.serving.knative.dev"
GROUPS: Final = (SERVING, "autoscaling.internal.knative.dev")
KINDS: Final = ("Service", "Configuration", "Revision", "Route", "PodAutoscaler")
DNS_1035: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"
DNS_1035_RULE: Final = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    f"and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '{DNS_1035}')"
)
INSECURE: Final = "Kubernetes default value is insecure, Knative may default this to secure in a future release"


def no_account(_namespace: str, _name: str) -> bool:
    return False


@dataclass(slots=True)
class KnativeWebhook:
    """`features`: the flags of config-features, by their names there; `has_account`: whether a ServiceAccount is."""

    features: dict[str, str] = field(default_factory=dict)
    has_account: Callable[[str, str], bool] = no_account

    def mutate(self, kind: Kind, old: Json | None, new: Json, user: str) -> Json:
        """Raises Refused (400)."""
        if kind.group not in GROUPS or kind.kind not in KINDS:
            return new
        return signed(kind.kind, old, defaulted(kind.kind, new), user)

    def validate(self, kind: Kind, old: Json | None, new: Json, user: str, *, dry_run: bool) -> list[str]:
        """What is warned of. Raises Refused (400), with the warnings."""
        if kind.group not in GROUPS or kind.kind not in KINDS:
            return []
        template = (new.get("spec") or {}).get("template") or {}
        listed = insecure(template.get("spec") or {}, "spec.template.spec") if template else []
        warnings = [f"{INSECURE}: {', '.join(listed)}"] if listed else []
        try:
            if faults := list(self._faults(kind.kind, old, new)):
                raise denied(WEBHOOK, f"validation failed: {printed(faults)}")
            if dry_run and kind.kind == "Service":
                self._dry_run(new)
        except Refused as error:
            error.warnings = tuple(warnings)
            raise
        return warnings

    def _allows_zero(self) -> bool:
        """A key of config-autoscaler."""
        return self.features.get("allow-zero-initial-scale") == "true"

    def _dry_run(self, new: Json) -> None:
        namespace = new["metadata"].get("namespace", "")
        if why := dry_run_pod(new["spec"]["template"]["spec"], namespace, self.has_account):
            raise denied(WEBHOOK, f"validation callback failed: dry run failed with {why}: spec.template")

    def _faults(self, kind: str, old: Json | None, new: Json) -> Iterator[Fault]:
        metadata, spec = new["metadata"], new.get("spec") or {}
        rules = Rules(self.features)
        yield from _label(metadata["name"], "not a DNS 1035 label", "metadata.name")
        if kind in OWNED:
            yield from _signatures(old, new)
        match kind:
            case "Service" | "Configuration":
                template = spec.get("template") or {}
                annotations = template.get("metadata", {}).get("annotations") or {}
                if kind == "Service":
                    yield from of_service(metadata.get("annotations") or {}, "metadata.annotations")
                    yield from _traffic(spec.get("traffic") or [], "spec.traffic")
                for fault in of_template(annotations, "spec.template.metadata.annotations"):
                    if not (self._allows_zero() and fault[1].endswith("initial-scale=0 not allowed by cluster")):
                        yield fault
                yield from rules.of_revision(template.get("spec") or {}, "spec.template.spec")
                yield from _named(template, metadata["name"])
                if old is not None:
                    yield from _renamed(old["spec"].get("template") or {}, template)
            case "Revision":
                if old is None:
                    yield from of_template(metadata.get("annotations") or {}, "metadata.annotations")
                    yield from rules.of_revision(spec, "spec")
                elif old.get("spec") != spec:
                    yield "Immutable fields changed (-old +new)", "spec", _changes(old["spec"], spec)
            case "Route":
                yield from _traffic(spec.get("traffic") or [], "spec.traffic", route=True)
            case "PodAutoscaler":
                yield from _autoscaler(metadata.get("annotations") or {}, spec)


def printed(faults: list[Fault]) -> str:
    """As FieldError.Error: one line for each message, its paths merged, by message."""
    merged: dict[tuple[str, str], list[str]] = {}
    for message, path, details in faults:
        paths = merged.setdefault((message, details), [])
        if path not in paths:
            paths.append(path)
    lines = []
    for message, details in sorted(merged):
        text = f"{message}: {', '.join(sorted(merged[message, details]))}"
        lines.append(f"{text}\n{details}" if details else text)
    return "\n".join(lines)


def _label(name: str, message: str, path: str) -> Iterator[Fault]:
    wrong = []
    if len(name) > 63:
        wrong.append("must be no more than 63 characters")
    if not re.fullmatch(DNS_1035, name):
        wrong.append(DNS_1035_RULE)
    if wrong:
        yield f"{message}: [{', '.join(wrong)}]", path, ""


def _signatures(old: Json | None, new: Json) -> Iterator[Fault]:
    if old is None:
        return
    was, now = (each["metadata"].get("annotations") or {} for each in (old, new))
    if CREATOR in was and now.get(CREATOR) != was[CREATOR]:
        yield "annotation value is immutable", f"metadata.annotations.{CREATOR}", ""
    if old.get("spec") == new.get("spec") and MODIFIER in was and now.get(MODIFIER) != was[MODIFIER]:
        yield f"invalid value: {now.get(MODIFIER, '')}", f"metadata.annotations.{MODIFIER}", ""


def _named(template: Json, owner: str) -> Iterator[Fault]:
    name = template.get("metadata", {}).get("name")
    if not name:
        return
    at = "spec.template.metadata.name"
    yield from _label(name, "invalid value: not a DNS 1035 label", at)
    if not name.startswith(f"{owner}-"):
        yield f'invalid value: "{name}" must have prefix "{owner}-"', at, ""


def _renamed(old: Json, new: Json) -> Iterator[Fault]:
    """A template with a name of its own changes its name whenever it changes."""
    names = [each.get("metadata", {}).get("name") for each in (old, new)]
    if names[0] and names[0] == names[1] and old != new:
        message = "Saw the following changes without a name change (-old +new)"
        yield message, "spec.template.metadata.name", _changes(old.get("spec") or {}, new.get("spec") or {})


def _changes(old: Json, new: Json) -> str:
    """The scalars of a RevisionSpec that changed; what lies deeper is not imitated."""
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    lines = []
    for name in changed:
        went = [str(each.get(name)) if not isinstance(each.get(name), dict | list) else "..." for each in (old, new)]
        shown = f"{name[0].upper()}{name[1:]}"
        lines.append(f'*{{v1.RevisionSpec}}.{shown}:\n\t-: "{went[0]}"\n\t+: "{went[1]}"\n')
    return "".join(lines)


def _traffic(targets: list[Json], path: str, *, route: bool = False) -> Iterator[Fault]:
    total, tags = 0, dict[str, int]()
    for index, each in enumerate(targets):
        at, percent = f"{path}[{index}]", each.get("percent") or 0
        total += percent
        if not 0 <= percent <= 100:
            yield f"expected 0 <= {percent} <= 100", f"{at}.percent", ""
        name, latest = each.get("revisionName", ""), bool(each.get("latestRevision"))
        if latest == bool(name):
            why = f'may not set revisionName "{name}" when latestRevision is {str(latest).lower()}'
            yield why, f"{at}.latestRevision", ""
        if each.get("configurationName") and not route:
            yield "must not set the field(s)", f"{at}.configurationName", ""
        if tag := each.get("tag"):
            yield from _label(tag, "invalid value: not a DNS 1035 label", f"{path}.tag[{index}]")
            if tag in tags:
                for where in (tags[tag], index):
                    yield f'Multiple definitions for "{tag}"', f"{path}[{where}].tag", ""
            tags.setdefault(tag, index)
    if targets and total != 100:
        yield f"Traffic targets sum to {total}, want 100", path, ""


def _autoscaler(annotations: dict[str, str], spec: Json) -> Iterator[Fault]:
    yield from of_autoscaler(annotations, "metadata.annotations")
    protocol, target = spec.get("protocolType"), spec.get("scaleTargetRef") or {}
    concurrency = spec.get("containerConcurrency", 0)
    if not protocol:
        yield "missing field(s)", "spec.protocolType", ""
    elif protocol not in ("http1", "h2c"):
        yield f"invalid value: {protocol}", "spec.protocolType", ""
    for name in ("apiVersion", "kind", "name"):
        if not target.get(name):
            yield "missing field(s)", f"spec.scaleTargetRef.{name}", ""
    if not 0 <= concurrency <= 1000:
        yield f"expected 0 <= {concurrency} <= 1000", "spec.containerConcurrency", ""


__all__ = ["AUTOSCALING", "KnativeWebhook"]
