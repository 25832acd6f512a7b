"""The books of the HBM pool: which blocks are in use, which are free, which can be used again.

A block id names the same page in every KV group, so one pool serves them all. A block is one of::

    in use      referenced by requests or by outstanding plans; perhaps indexed as well
    cached      no reference, but indexed: a prefix may still be found in it, until it is evicted
    free        neither
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.constants import TOKEN_BYTES
from kvtier.errors import KVTierError
from kvtier.keys import encode_tokens, extend_chain
from kvtier_engine.free_runs import FreeRuns

#: Cached blocks evicted at once, at most: single evictions would leave no runs to grow in.
EVICT_BATCH_MAX = 16
#: One of so many blocks of the pool may be evicted before it is needed.
EVICT_SHARE = 64

#: Digest of a block, given its parent's digest and its tokens as little-endian int32.
BlockDigest = Callable[[bytes, bytes], bytes]


class BlockPoolError(KVTierError):
    """The pool's books contradict themselves: a bug, after which no output can be trusted."""


def block_root(cache_salt: str) -> bytes:
    """Return the digest that a tenant's chains start from, so that no two tenants share one."""
    return hashlib.sha256(b"kvtier-blocks" + cache_salt.encode()).digest()


@dataclass(eq=False, slots=True)
class _Entry:
    """An indexed block. ``parent`` is the entry of the block before it, or the tenant's salt."""

    digest: bytes
    content: bytes
    parent: _Entry | str
    block_id: int
    children: set[_Entry] = field(default_factory=set)


class BlockChain:
    """The full blocks of one growing token sequence, chained by digest: O(new tokens) to extend.

    ``tip`` is the pool's bookmark: the entry of block ``registered - 1``, the last one indexed.
    """

    def __init__(self, cache_salt: str, block_tokens: int, digest: BlockDigest) -> None:
        self.salt = cache_salt
        self.digests: list[bytes] = []
        self.contents: list[bytes] = []
        self.registered = 0
        self.tip: _Entry | None = None
        self._block_tokens = block_tokens
        self._digest = digest

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the blocks that ``tokens``, the whole sequence so far, has filled."""
        first = len(self.digests) * self._block_tokens
        stop = len(tokens) - len(tokens) % self._block_tokens
        if stop <= first:
            return
        data = encode_tokens(tokens[first:stop])
        step = self._block_tokens * TOKEN_BYTES
        parent = self.digests[-1] if self.digests else block_root(self.salt)
        for start in range(0, len(data), step):
            content = bytes(data[start : start + step])
            parent = self._digest(parent, content)
            self.digests.append(parent)
            self.contents.append(content)


class BlockPool:
    """Owner of the block ids ``0 .. block_count - 1``. One thread only: the engine's.

    A prefix is found only where the digest, the tokens and the whole chain of parents agree, so
    a colliding digest costs a miss and never a wrong block. What is indexed is full and computed;
    an indexed block's parent is indexed too.
    """

    def __init__(
        self, block_count: int, block_tokens: int, *, digest: BlockDigest = extend_chain
    ) -> None:
        self._block_count = block_count
        self._block_tokens = block_tokens
        self._digest = digest
        self._references = [0] * block_count
        self._free = FreeRuns(block_count)
        self._index: dict[bytes, _Entry] = {}
        self._entry_of: dict[int, _Entry] = {}
        #: Cached blocks, the next victim first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._evicted = 0

    @property
    def block_count(self) -> int:
        """Blocks in the pool."""
        return self._block_count

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._block_tokens

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could give out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without a reference in which a prefix can still be found."""
        return len(self._cached)

    @property
    def indexed(self) -> int:
        """Blocks in which a prefix can be found, in use or not."""
        return len(self._index)

    @property
    def evicted(self) -> int:
        """Cached blocks given up so far."""
        return self._evicted

    def chain(self, cache_salt: str) -> BlockChain:
        """Return an empty chain for one sequence of this pool."""
        return BlockChain(cache_salt, self._block_tokens, self._digest)

    def references(self, block_id: int) -> int:
        """Number of references held on a block."""
        return self._references[block_id]

    def find(self, chain: BlockChain, blocks_max: int) -> list[int]:
        """Return the blocks of the longest indexed prefix, at most ``blocks_max`` of them.

        They stay findable only until the next ``allocate``, unless the caller retains them.
        """
        found: list[int] = []
        parent: _Entry | str = chain.salt
        for digest, content in zip(
            chain.digests[:blocks_max], chain.contents[:blocks_max], strict=True
        ):
            entry = self._index.get(digest)
            if entry is None or entry.parent != parent or entry.content != content:
                break
            found.append(entry.block_id)
            parent = entry
        return found

    def available_beside(self, found: Sequence[int]) -> int:
        """Blocks that could be allocated once ``found`` is retained."""
        return self.available - sum(not self._references[block_id] for block_id in found)

    def releasable(self, block_ids: Iterable[int]) -> int:
        """Blocks among these that one release each would make available."""
        return sum(self._references[block_id] == 1 for block_id in block_ids)

    def retain(self, block_ids: Iterable[int]) -> None:
        """Take a reference on each block; each is in use or cached."""
        for block_id in block_ids:
            assert self._references[block_id] or block_id in self._cached, f"{block_id} is free"
            self._references[block_id] += 1
            self._cached.pop(block_id, None)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block, named in the order of their sequence.

        The last blocks of a sequence become the first victims: a prefix outlives its suffixes.
        """
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} released too often"
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._entry_of:
                self._cached[block_id] = None
            else:
                self._free.add(block_id)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Return ``count`` blocks with one reference each, or None and change nothing.

        Evicts cached blocks as needed, never one that is referenced. ``after`` is the block that
        the new ones should follow in memory, where that can be had.
        """
        if count > self.available:
            return None
        if count > len(self._free):
            spare = min(EVICT_BATCH_MAX, self._block_count // EVICT_SHARE)
            while self._cached and len(self._free) < count + spare:
                self._evict()
        block_ids = self._free.take(count, after)
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def register(self, chain: BlockChain, block_ids: Sequence[int]) -> None:
        """Index a sequence's leading blocks: ``block_ids[i]`` holds block ``i`` of the chain.

        The caller holds a reference on each, and each is full and computed. Where another block
        holds the same prefix already, that one stays the one to be found.
        """
        parent: _Entry | str = chain.salt
        first = 0
        if chain.tip is not None and self._index.get(chain.tip.digest) is chain.tip:
            first, parent = chain.registered, chain.tip
        for position in range(first, len(block_ids)):
            digest, content = chain.digests[position], chain.contents[position]
            entry = self._index.get(digest)
            if entry is None:
                entry = self._insert(_Entry(digest, content, parent, block_ids[position]))
            elif entry.parent != parent or entry.content != content:
                return
            chain.registered, chain.tip, parent = position + 1, entry, entry

    def forget(self) -> None:
        """Drop the whole index: what the blocks hold is no longer what their tokens stand for."""
        self._index.clear()
        self._entry_of.clear()
        for block_id in self._cached:
            self._free.add(block_id)
        self._cached.clear()

    def check_integrity(self, expected: Counter[int]) -> None:
        """Raise ``BlockPoolError`` unless the books agree with each other and with ``expected``.

        ``expected`` counts the references that the pool's users know of, by block.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise BlockPoolError(f"{len(self._free)} free blocks counted, {len(free)} listed")
        for block_id in range(self._block_count):
            held = self._references[block_id]
            if held != expected[block_id]:
                raise BlockPoolError(
                    f"block {block_id} has {held} references, its users {expected[block_id]}"
                )
            state = (held > 0, block_id in self._cached, block_id in free)
            if sum(state) != 1:
                raise BlockPoolError(f"block {block_id}: in use, cached, free = {state}")
            if block_id not in self._entry_of and block_id in self._cached:
                raise BlockPoolError(f"block {block_id} is cached but cannot be found")
            if block_id in self._entry_of and block_id in free:
                raise BlockPoolError(f"block {block_id} is free but can be found")
        self._check_index()

    def _check_index(self) -> None:
        if len(self._index) != len(self._entry_of):
            raise BlockPoolError(f"{len(self._index)} digests, {len(self._entry_of)} blocks")
        for digest, entry in self._index.items():
            if entry.digest != digest or self._entry_of.get(entry.block_id) is not entry:
                raise BlockPoolError(f"block {entry.block_id} is indexed as another")
            parent = entry.parent
            if isinstance(parent, _Entry) and (
                self._index.get(parent.digest) is not parent or entry not in parent.children
            ):
                raise BlockPoolError(f"block {entry.block_id} is indexed without its parent")
            if any(self._index.get(child.digest) is not child for child in entry.children):
                raise BlockPoolError(f"block {entry.block_id} has a child that is not indexed")

    def _insert(self, entry: _Entry) -> _Entry:
        assert entry.block_id not in self._entry_of, f"block {entry.block_id} is indexed already"
        self._index[entry.digest] = self._entry_of[entry.block_id] = entry
        if isinstance(entry.parent, _Entry):
            entry.parent.children.add(entry)
        return entry

    def _evict(self) -> None:
        """Free one cached block: the least recently used, or rather the deepest below it."""
        entry = self._entry_of[next(iter(self._cached))]
        while True:
            below = (each for each in entry.children if not self._references[each.block_id])
            child = next(below, None)
            if child is None:
                break
            entry = child
        self._unindex(entry)
        self._evicted += 1

    def _unindex(self, entry: _Entry) -> None:
        """Take an entry out of the index, and what can be reached through it only."""
        if isinstance(entry.parent, _Entry):
            entry.parent.children.discard(entry)
        doomed = [entry]
        while doomed:
            each = doomed.pop()
            doomed.extend(each.children)
            del self._index[each.digest], self._entry_of[each.block_id]
            if each.block_id in self._cached:
                del self._cached[each.block_id]
                self._free.add(each.block_id)
