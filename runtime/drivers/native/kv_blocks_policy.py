"""Which KV blocks are free and how many a request needs. Where a block lies in memory is the backend's business."""

from typing import Final

BLOCK_SIZE: Final = 16  # tokens; gathering makes larger blocks no faster, and smaller ones waste less


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def worst_case_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """KV entries of a request that runs to its end: the last generated token is never attended to."""
    return prompt_tokens + max_tokens - 1


class BlockPool:
    """Blocks 0 to `total` - 1; a block is free or held once. Last freed is first reused: its pages are warm."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"<BlockPool free={self.free}/{self.total}>"

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def try_allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks in order of use, or None where fewer are free; never some of them."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._held.update(blocks)
        return blocks

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give back what `try_allocate` gave. Raises ValueError for a block that is not held: nothing is changed."""
        strangers = [block for block in blocks if block not in self._held]
        if strangers or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {strangers or blocks} are not held once each")
        self._held.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or held, and never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._held, "a block is free and held"
        assert free | self._held == set(range(self.total)), "a block is lost"
