"""Whether a model may have such a ladder. What it does is the activator's."""

from collections.abc import Callable, Sequence
from math import inf

from controlplane.registry.policy.domain import Model
from kelvin.contracts.errors import Conflict, InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.names import DEFAULT_ALIAS, require_model_name, split_qualified_name
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.degradation_steps import CapOutput, DegradationStep, Fallback, Ladder

FindModel = Callable[[tuple[str, str]], Model | None]  # by tenant and name


def check_degradation(model: Model, ladder: Ladder, find: FindModel) -> None:
    """Raises Refused: InvalidRequest (order, a step twice, itself, too many tokens), ModelNotFound (what its owner may
    not call), Conflict (of a model that does not generate, or to one).
    """
    _check_steps(model, ladder.steps, find, "steps")
    for plan, steps in ladder.plans.items():
        _check_steps(model, steps, find, f"plans.{plan}")


def _check_steps(model: Model, steps: Sequence[DegradationStep], find: FindModel, field: str) -> None:
    if not steps:
        return
    waits = [inf if step.wait_s is None else step.wait_s for step in steps]
    if waits != sorted(waits):
        rule = "must be in the order of their waits, those without one last"
        raise Refused(InvalidRequest(field, str([step.wait_s for step in steps]), rule))
    if len(set(steps)) < len(steps):
        raise Refused(InvalidRequest(field, f"({len(steps)})", "must name each step once"))
    _check_kind(model, model.model)
    for step in steps:
        if isinstance(step, Fallback):
            _check_fallback(model, step.model, find)
        if isinstance(step, CapOutput) and step.tokens > MAX_LIMIT:
            raise Refused(InvalidRequest("tokens", str(step.tokens)[:40], f"must be {MAX_LIMIT} or less"))


def _check_fallback(model: Model, named: str, find: FindModel) -> None:
    owner, name = split_qualified_name(model.tenant, require_model_name(named, "model"))
    if (owner, name) == (model.tenant, model.model):
        raise Refused(InvalidRequest("model", repr(named), "must be another one"))
    other = find((owner, name))
    if other is None or (owner != model.tenant and model.tenant not in other.grantees):
        raise Refused(ModelNotFound(named))
    _check_kind(other, named)


def _check_kind(model: Model, named: str) -> None:
    """An embedding of another model is in another space, a prediction of other features: neither is a lesser one."""
    version = model.version(model.aliases.get(DEFAULT_ALIAS, ""))
    kind = "generate" if version is None else version.registration.kind
    if kind != "generate":
        raise Refused(
            Conflict(f"model '{named}'", f"is of the kind '{kind}': only of one that generates there is less")
        )
