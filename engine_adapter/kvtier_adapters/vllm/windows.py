"""Blocks of sliding windows, which vLLM gives back while a request goes on.

As a window moves past blocks, vLLM puts its null block in their place, before the next step's
orders::

    tokens   0 ──────── chunk ──────────────── computed ─── scheduled
    table    null null │ null  kept kept  window window │ new new
                       └─ taken by a store once it is complete

So their chunks are stored from references of our own, which begin with the step that fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtier.types import GroupKind, KVLayout
from kvtier_adapters.vllm.requests import Followed

#: The number of vLLM's null block, which stands for what no window needs.
NULL_BLOCK: Final = 0


class KeptBlocks:
    """References to what requests will store, by request and chunk. The scheduler's thread only.

    No step finds too few blocks because of them: they are given up where fewer than
    ``step_blocks``, what one step may take, would be left if they were as many again.
    """

    def __init__(self, block_tokens: int, step_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._step_blocks = step_blocks
        self._pool: Any = None
        self._kept: dict[str, tuple[Followed, dict[int, list[Any]]]] = {}
        self._count = 0

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool: as for stores, and ``get_num_free_blocks``."""
        self._pool = pool

    def begin(self, followed: Followed, tables: Sequence[Sequence[int]]) -> None:
        """Take note of whole block tables. Chunks of which a block is null cannot be stored."""
        self.let_go(followed)
        followed.tables = [list(table) for table in tables]
        nulls = max(map(_nulls, _windows(followed, followed.tables)), default=0)
        followed.lost_chunks = -(-nulls // self._chunk_blocks(followed))

    def keep(self, followed: Followed) -> None:
        """Keep the blocks of windows that a request has, from its first chunk to store on."""
        tables, size = _windows(followed, followed.tables), self._chunk_blocks(followed)
        if not tables or self._pool is None:
            return
        if self._pool.get_num_free_blocks() < self._step_blocks + self._count:
            self.let_go(followed)
            # The window that begins behind this step is in the request's own blocks.
            window = min(filter(None, _window_tokens(followed)))
            gone = max(0, followed.settled - window) // self._block_tokens
            followed.lost_chunks = max(followed.lost_chunks, -(-gone // size))
            return
        request_id = followed.request.request_id
        _, chunks = self._kept.setdefault(request_id, (followed, {}))
        first = max(followed.stored_chunks, followed.lost_chunks, max(chunks, default=0))
        for chunk in range(first, -(-min(map(len, tables)) // size)):
            ids = [each for table in tables for each in table[chunk * size : (chunk + 1) * size]]
            held = {block.block_id for block in chunks.setdefault(chunk, [])}
            more = [self._pool.blocks[each] for each in ids if each not in held]
            self._pool.touch(more)
            chunks[chunk] += more
            self._count += len(more)

    def let_go(self, followed: Followed, end: int | None = None) -> None:
        """Give back what is kept of a request's chunks before ``end``: they are stored no more."""
        _, chunks = self._kept.get(followed.request.request_id, (followed, {}))
        for chunk in [each for each in chunks if end is None or each < end]:
            blocks = chunks.pop(chunk)
            self._count -= len(blocks)
            self._pool.free_blocks(reversed(blocks))
        if end is not None and _windows(followed, followed.tables):
            followed.lost_chunks = max(followed.lost_chunks, end)
        if not chunks:
            self._kept.pop(followed.request.request_id, None)

    def let_preempted_go(self) -> None:
        """Give back what is kept of requests that have to begin again."""
        for followed, _ in list(self._kept.values()):
            if followed.request.num_computed_tokens == 0:
                self.let_go(followed)

    def clear(self) -> None:
        """Give everything back."""
        for followed, _ in list(self._kept.values()):
            self.let_go(followed)

    def _chunk_blocks(self, followed: Followed) -> int:
        return followed.sequence.chunk_tokens // self._block_tokens


def has_windows(layout: KVLayout) -> bool:
    """Tell whether some layers attend to the last tokens only."""
    return any(group.kind is GroupKind.WINDOW for group in layout.groups)


def whole_group(layout: KVLayout) -> int:
    """Return the first group that attends to all tokens, whose blocks are all there; 0: none."""
    kinds = [group.kind for group in layout.groups]
    return next((at for at, kind in enumerate(kinds) if kind is not GroupKind.WINDOW), 0)


def _window_tokens(followed: Followed) -> list[int]:
    """Return the windows of a request's groups; 0: none."""
    return [group.window_tokens for group in followed.sequence.layout.groups]


def _windows(followed: Followed, tables: Sequence[list[int]]) -> list[list[int]]:
    """Return the tables of groups with a window."""
    pairs = zip(_window_tokens(followed), tables, strict=True) if tables else ()
    return [table for window, table in pairs if window]


def _nulls(table: Sequence[int]) -> int:
    """Return how many blocks there are up to the last one that is null."""
    return max((at for at, block in enumerate(table, 1) if block == NULL_BLOCK), default=0)
