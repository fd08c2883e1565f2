"""Track which KV blocks are free, and compute how many a request needs. Backends map blocks to memory."""

from typing import Final

BLOCK_SIZE: Final = 16  # tokens; since attention gathers slots, larger blocks are not faster and waste more


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def worst_case_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Return the KV entries of a request that runs to its end. The last generated token needs none."""
    return prompt_tokens + max_tokens - 1


class BlockPool:
    """Blocks 0 to `total` - 1, each free or held once. The last freed block is reused first: its pages are warm."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"<BlockPool free={self.free}/{self.total}>"

    @property
    def free(self) -> int:
        """Return how many blocks are free."""
        return len(self._free)

    def try_allocate(self, count: int) -> tuple[int, ...] | None:
        """Return `count` blocks in order of use, or None if fewer are free."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._held.update(blocks)
        return blocks

    def release(self, blocks: tuple[int, ...]) -> None:
        """Free blocks. Raises ValueError for a block that is not held; nothing is changed then."""
        unknown = [block for block in blocks if block not in self._held]
        if unknown or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {unknown or blocks} are not held once each")
        self._held.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is either free or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._held, "a block is free and held"
        assert free | self._held == set(range(self.total)), "a block is lost"
