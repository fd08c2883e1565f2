"""Choose the tokens that the next step computes: every decode, then as much prefill as the budget leaves.

If owner and guests have prompts, the owner gets at least half of the prefill. The rest is max-min fair over tenants,
and first come, first served within a tenant. Nothing is ever preempted, because a request starts only when blocks for
its worst case are free (`native/kv_blocks_policy.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.drivers.interface import OWNER_TENANT


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens per step. On a CPU a prefill token adds 1.3 ms, so 64-128 of them slow decodes by at most 2.4-4x. Without
    decodes nothing is delayed, and a lone prompt should not be split.
    """

    mixed_tokens: int  # for a step with decodes
    lone_tokens: int  # for a step without decodes
    min_prefill_tokens: int  # so that decodes never starve prefill

    def prefill_tokens(self, decodes: int, *, has_guests: bool = False) -> int:
        """Return the prefill tokens of a step with `decodes` decodes. With guests' prompts a step stays short, because
        a request of the owner may arrive during it.
        """
        if decodes == 0 and not has_guests:
            return self.lone_tokens
        return max(self.min_prefill_tokens, self.mixed_tokens - decodes)


CPU_BUDGET = Budget(mixed_tokens=96, lone_tokens=512, min_prefill_tokens=16)
CUDA_BUDGET = Budget(mixed_tokens=2048, lone_tokens=8192, min_prefill_tokens=256)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One running sequence: how many tokens it has (prompt and generated), how many of them have KV, and its tenant."""

    total_tokens: int
    computed_tokens: int
    tenant: str = OWNER_TENANT

    @property
    def uncomputed_tokens(self) -> int:
        """Return how many tokens have no KV."""
        return self.total_tokens - self.computed_tokens

    @property
    def is_decode(self) -> bool:
        """Return whether one token remains after a history. A one-token prompt is a prefill."""
        return self.total_tokens - self.computed_tokens == 1 and self.computed_tokens > 0


@dataclass(frozen=True, slots=True)
class TokenAllotment:
    """The decision that the sequence at `index` computes its next `count` tokens."""

    index: int
    count: int


def plan_step(running: Sequence[SequenceState], budget: Budget) -> tuple[TokenAllotment, ...]:
    """Return the step's allotments, decodes first. `running` is in order of arrival, each with work left."""
    decodes = [TokenAllotment(index, 1) for index, state in enumerate(running) if state.is_decode]
    prompts: dict[str, list[int]] = {}  # indices by tenant
    for index, state in enumerate(running):
        if not state.is_decode:
            prompts.setdefault(state.tenant, []).append(index)
    needs = {tenant: sum(running[index].uncomputed_tokens for index in indices) for tenant, indices in prompts.items()}
    left = budget.prefill_tokens(len(decodes), has_guests=any(prompts.keys() - {OWNER_TENANT}))
    prefills: list[TokenAllotment] = []
    if OWNER_TENANT in prompts and len(prompts) > 1:
        # The owner's first token arrives at the end of this step. So the owner gets at least half of the budget, and
        # the guests together get at most as much as the owner (or the minimum).
        guests = sum(needs.values()) - needs[OWNER_TENANT]
        share = min(needs[OWNER_TENANT], max(left - left // 2, left - guests))
        left = min(left - share, max(share, budget.min_prefill_tokens))
        prefills += _prefill(running, prompts.pop(OWNER_TENANT), share)
    # Max-min: the tenant with the smallest need comes first. Its unused share goes to the others.
    by_need = sorted(prompts, key=needs.__getitem__)
    for number, tenant in enumerate(by_need):
        share = -(-left // (len(by_need) - number))
        prefills += _prefill(running, prompts[tenant], share)
        left -= min(share, needs[tenant])
    return (*decodes, *sorted(prefills, key=lambda allotment: allotment.index))


def _prefill(running: Sequence[SequenceState], indices: Sequence[int], tokens: int) -> Iterator[TokenAllotment]:
    for index in indices:
        if count := min(tokens, running[index].uncomputed_tokens):
            yield TokenAllotment(index, count)
            tokens -= count
