"""Choose the tokens that the next step computes: every decode, then as much prefill as the budget leaves.

If owner and guests have prompts, the owner gets at least half of the prefill. The rest is max-min fair over tenants,
and first come, first served within a tenant. Admission is by worst case (`blocks`), so nothing is ever preempted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

OWNER_TENANT: Final = ""  # stands for the tenant that owns the version


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens per step. On a CPU a prefill token costs 1.3 ms beside decodes, so 64-128 keep their stall under 2.4-4x;
    where nothing decodes there is no one to stall, and a lone prompt should not be cut."""

    mixed_tokens: int  # of a step in which something decodes
    lone_tokens: int  # of a step in which nothing does
    min_prefill_tokens: int  # prefill never starves behind decodes

    def prefill_tokens(self, decodes: int, *, has_guests: bool = False) -> int:
        """Return the prefill tokens of a step with so many decodes. Steps with guests' prompts stay short, because a
        request of the owner may arrive during one.
        """
        if decodes == 0 and not has_guests:
            return self.lone_tokens
        return max(self.min_prefill_tokens, self.mixed_tokens - decodes)


CPU_BUDGET = Budget(mixed_tokens=96, lone_tokens=512, min_prefill_tokens=16)
CUDA_BUDGET = Budget(mixed_tokens=2048, lone_tokens=8192, min_prefill_tokens=256)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One running sequence: tokens it has (prompt and generated), how many of them have KV, and whose it is."""

    known: int
    computed: int
    tenant: str = OWNER_TENANT

    @property
    def uncomputed(self) -> int:
        """Tokens without KV."""
        return self.known - self.computed

    @property
    def is_decode(self) -> bool:
        """One token to go, with history; a one-token prompt is a prefill."""
        return self.known - self.computed == 1 and self.computed > 0


@dataclass(frozen=True, slots=True)
class TokenAllotment:
    """The sequence at `index` computes its next `count` tokens."""

    index: int
    count: int


def plan_step(running: Sequence[SequenceState], budget: Budget) -> tuple[TokenAllotment, ...]:
    """The step's shares, decodes first; `running` is in order of arrival and each has at least one token to compute."""
    decodes = [TokenAllotment(index, 1) for index, progress in enumerate(running) if progress.is_decode]
    prompts: dict[str, list[int]] = {}  # indices of each tenant
    for index, progress in enumerate(running):
        if not progress.is_decode:
            prompts.setdefault(progress.tenant, []).append(index)
    needs = {tenant: sum(running[index].uncomputed for index in own) for tenant, own in prompts.items()}
    left = budget.prefill_tokens(len(decodes), has_guests=any(prompts.keys() - {OWNER_TENANT}))
    prefills: list[TokenAllotment] = []
    if OWNER_TENANT in prompts and len(prompts) > 1:
        # The owner's first token comes at the end of this step. So the owner has half of it at least, and guests
        # compute no more in it than the owner does, or the minimum.
        guests = sum(needs.values()) - needs[OWNER_TENANT]
        part = min(needs[OWNER_TENANT], max(left - left // 2, left - guests))
        left = min(left - part, max(part, budget.min_prefill_tokens))
        prefills += _prefill(running, prompts.pop(OWNER_TENANT), part)
    # Max-min: the tenant that needs least goes first, and leaves the rest of its part to the others.
    by_need = sorted(prompts, key=needs.__getitem__)
    for number, tenant in enumerate(by_need):
        part = -(-left // (len(by_need) - number))
        prefills += _prefill(running, prompts[tenant], part)
        left -= min(part, needs[tenant])
    return (*decodes, *sorted(prefills, key=lambda share: share.index))


def _prefill(running: Sequence[SequenceState], indices: Sequence[int], tokens: int) -> Iterator[TokenAllotment]:
    for index in indices:
        if count := min(tokens, running[index].uncomputed):
            yield TokenAllotment(index, count)
            tokens -= count


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """`total` in whole parts proportional to `weights` (not all zero); they sum to it exactly, each within one of its
    due."""
    whole = sum(weights)
    parts: list[int] = []
    passed = given = 0
    for weight in weights:
        passed += weight
        upto = total * passed // whole
        parts.append(upto - given)
        given = upto
    return tuple(parts)
