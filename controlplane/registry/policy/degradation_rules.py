"""Decide whether a model may have these degradation steps. The activator applies them."""

from collections.abc import Callable, Sequence
from math import inf

from controlplane.registry.policy.domain import Model
from kelvin.contracts.errors import Conflict, InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.names import DEFAULT_ALIAS, require_model_name, split_qualified_name
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.degradation_steps import CapOutput, DegradationStep, Fallback, Ladder

FindModel = Callable[[tuple[str, str]], Model | None]  # by tenant and name


def check_degradation(model: Model, ladder: Ladder, find: FindModel) -> None:
    """Check the steps for all plans. Raises Refused: InvalidRequest (wrong order, a duplicate step, the model itself,
    too many tokens), ModelNotFound (the owner may not call the fallback), Conflict (a model or fallback that does not
    generate).
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
    """Check that the model generates. Raises Refused(Conflict) if not: an embedding of another model is in another
    space, and a prediction needs other features, so neither can stand in for the model's own.
    """
    version = model.version(model.aliases.get(DEFAULT_ALIAS, ""))
    kind = "generate" if version is None else version.registration.kind
    if kind != "generate":
        raise Refused(
            Conflict(f"model '{named}'", f"is of the kind '{kind}': only of one that generates there is less")
        )
