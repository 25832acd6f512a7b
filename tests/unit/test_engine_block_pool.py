"""The pool's books: runs, references, the index and who is evicted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_engine.block_pool import EVICT_BATCH_MAX, BlockChain, BlockPool, BlockPoolError
from kvtier_engine.free_runs import FreeRuns
from tests.lib.toy_engine import ToyEngine, prompt_of


def chain_of(pool: BlockPool, tokens: Sequence[int], salt: str = "") -> BlockChain:
    chain = pool.chain(salt)
    chain.extend(tokens)
    return chain


def put(pool: BlockPool, tokens: Sequence[int], salt: str = "") -> list[int]:
    """Allocate blocks for a prefix and index them; the caller holds one reference on each."""
    chain = chain_of(pool, tokens, salt)
    blocks = pool.allocate(len(chain.digests))
    assert blocks is not None
    pool.register(chain, blocks)
    return blocks


def found(pool: BlockPool, tokens: Sequence[int], salt: str = "") -> list[int]:
    chain = chain_of(pool, tokens, salt)
    return pool.find(chain, len(chain.digests))


class TestFreeRuns:
    def test_a_sequence_grows_in_place(self) -> None:
        runs = FreeRuns(100)
        first = runs.take(10)
        second = runs.take(10)
        assert first == list(range(10))
        assert second[0] > 10, "the second sequence leaves the first one room"
        assert runs.take(3, after=first[-1]) == [10, 11, 12]
        assert runs.take(2, after=second[-1]) == [second[-1] + 1, second[-1] + 2]

    def test_what_does_not_fit_in_one_run_takes_the_largest_first(self) -> None:
        runs = FreeRuns(10)
        taken = runs.take(10)
        for block in (0, 1, 4, 5, 6, 9):
            runs.add(block)
        assert runs.take(5) == [4, 5, 6, 0, 1]
        assert taken == list(range(10))

    @given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60))
    def test_ids_are_neither_lost_nor_doubled(
        self, count: int, moves: list[tuple[bool, int]]
    ) -> None:
        runs, held = FreeRuns(count), list[int]()
        for take, number in moves:
            if take and number <= len(runs):
                after = held[-1] if held and number % 2 else None
                held += runs.take(number, after)
            elif held:
                runs.add(held.pop(number % len(held)))
            assert sorted([*runs, *held]) == list(range(count))
            assert len(runs) == count - len(held)


class TestReferences:
    def test_all_or_nothing(self) -> None:
        pool = BlockPool(4, 4)
        blocks = pool.allocate(3)
        assert blocks is not None
        assert pool.allocate(2) is None
        assert pool.available == 1
        pool.check_integrity(Counter(blocks))

    def test_a_block_is_reused_only_when_its_last_reference_goes(self) -> None:
        pool = BlockPool(2, 4)
        (block,) = pool.allocate(1) or []
        pool.retain([block])
        pool.release([block])
        assert pool.available == 1
        pool.release([block])
        assert pool.available == 2

    def test_too_many_releases_are_a_bug(self) -> None:
        pool = BlockPool(2, 4)
        blocks = pool.allocate(1) or []
        pool.release(blocks)
        with pytest.raises(AssertionError, match="released too often"):
            pool.release(blocks)

    def test_a_leaked_reference_is_seen(self) -> None:
        pool = BlockPool(4, 4)
        blocks = pool.allocate(2) or []
        with pytest.raises(BlockPoolError, match="references"):
            pool.check_integrity(Counter(blocks[:1]))
        pool.check_integrity(Counter(blocks))


class TestIndex:
    def test_finds_the_longest_prefix_and_no_more(self) -> None:
        pool = BlockPool(8, 4)
        blocks = put(pool, range(12))
        assert found(pool, range(12)) == blocks
        assert found(pool, [*range(8), 9, 9, 9, 9]) == blocks[:2]
        assert found(pool, [1, *range(1, 12)]) == []
        assert pool.find(chain_of(pool, range(12)), 2) == blocks[:2]

    def test_the_same_tokens_after_another_start_are_not_the_same(self) -> None:
        pool = BlockPool(8, 4)
        put(pool, [1, 1, 1, 1, 2, 2, 2, 2])
        assert found(pool, [2, 2, 2, 2]) == []

    def test_tenants_share_nothing(self) -> None:
        pool = BlockPool(8, 4)
        blocks = put(pool, range(8), "a")
        assert found(pool, range(8), "b") == []
        assert found(pool, range(8)) == []
        assert found(pool, range(8), "a") == blocks
        others = put(pool, range(8), "b")
        assert found(pool, range(8), "b") == others, "nor do they stand in each other's way"

    def test_a_duplicate_leaves_the_first_one_to_be_found(self) -> None:
        pool = BlockPool(8, 4)
        first = put(pool, range(8))
        second = put(pool, range(8))
        assert found(pool, range(8)) == first
        pool.release(second)
        assert pool.cached == 0, "the copy is free, not cached"
        pool.check_integrity(Counter(first))

    def test_a_sequence_whose_start_was_evicted_registers_its_own_blocks(self) -> None:
        pool = BlockPool(4, 4)
        first = put(pool, range(8))
        chain = chain_of(pool, range(12))
        copies = pool.allocate(2) or []
        pool.register(chain, copies)
        pool.release(first)
        third = pool.allocate(2) or []
        assert found(pool, range(8)) == [], "evicted"
        pool.release(third)
        copies += pool.allocate(1) or []
        pool.register(chain, copies)
        assert found(pool, range(12)) == copies
        pool.check_integrity(Counter(copies))

    def test_b38_a_partial_block_is_never_found(self) -> None:
        """Only full blocks are indexed, so there is no partial hash that could come back."""
        pool = BlockPool(8, 4)
        chain = pool.chain("")
        blocks = pool.allocate(1) or []
        chain.extend([1, 2])
        pool.register(chain, blocks[: len(chain.digests)])
        assert pool.indexed == 0
        assert found(pool, [1, 2]) == []
        chain.extend([1, 2, 3, 4])
        pool.register(chain, blocks)
        pool.release(blocks)
        assert found(pool, [1, 2]) == []
        assert found(pool, [1, 2, 3, 4]) == blocks
        pool.retain(blocks)
        pool.release(blocks)
        assert pool.indexed == 1

    def test_b37_a_colliding_hash_is_a_miss(self) -> None:
        """Blocks whose digests collide are told apart by their tokens and by their parents."""

        def four_bits(parent: bytes, content: bytes) -> bytes:
            return bytes([(sum(parent) * 7 + sum(content)) % 16])

        engine = ToyEngine(24, digest=four_bits)
        for seed in range(40):
            engine.run(prompt_of(seed, 9), 4)
            engine.run(prompt_of(seed, 9), 4)

    def test_b37_equal_tokens_under_colliding_parents_are_told_apart(self) -> None:
        """Second blocks with one digest and one content, under two different first blocks."""
        pool = BlockPool(8, 4, digest=lambda _, content: content[:1])
        one, other = [1, 1, 1, 1, 5, 5, 5, 5], [2, 2, 2, 2, 5, 5, 5, 5]
        blocks = put(pool, one)
        others = put(pool, [*other, 6, 6, 6, 6])
        assert found(pool, other) == others[:1]
        assert found(pool, [*one, 6, 6, 6, 6]) == blocks
        pool.check_integrity(Counter(blocks + others))

    def test_b12_after_forget_nothing_is_found(self) -> None:
        pool = BlockPool(8, 4)
        held = put(pool, range(8))
        pool.release(put(pool, range(50, 58)))
        pool.forget()
        assert pool.indexed == 0
        assert found(pool, range(8)) == found(pool, range(50, 58)) == []
        pool.check_integrity(Counter(held))
        assert pool.available == 6


class TestEviction:
    def test_the_deepest_suffix_goes_first(self) -> None:
        pool = BlockPool(4, 4)
        blocks = put(pool, range(16))
        pool.release(blocks)
        for left in (3, 2, 1, 0):
            assert pool.allocate(1) is not None
            assert found(pool, range(16)) == blocks[:left]

    def test_the_least_recently_used_goes_first(self) -> None:
        pool = BlockPool(4, 4)
        old, new = put(pool, range(8)), put(pool, range(20, 28))
        pool.release(old)
        pool.release(new)
        pool.retain(old)
        pool.release(old)
        pool.allocate(2)
        assert found(pool, range(8)) == old
        assert found(pool, range(20, 28)) == []

    def test_a_parent_never_goes_before_its_free_children(self) -> None:
        """Even when the parent was released long before them, as by a store of the first chunk."""
        pool = BlockPool(4, 4)
        blocks = put(pool, range(16))
        for block in blocks:
            pool.release([block])
        pool.allocate(1)
        assert found(pool, range(16)) == blocks[:3]

    def test_what_is_out_of_reach_goes_with_its_parent(self) -> None:
        """A child in use outlives its parent, but is not findable any more."""
        pool = BlockPool(4, 4)
        parent, child = put(pool, range(8))
        pool.release([parent])
        pool.allocate(3)
        assert pool.indexed == 0
        pool.release([child])
        assert pool.cached == 0

    def test_b39_making_room_never_evicts_what_the_same_request_uses(self) -> None:
        """Capacity 4 holds [2, A, B, C], 2 the oldest; a batch wants [2, 3, 4, 5]."""
        pool = BlockPool(4, 4)
        wanted = put(pool, [2] * 4)
        pool.release(wanted)
        for token in (10, 11, 12):
            pool.release(put(pool, [token] * 4))
        hits = found(pool, [2] * 4)
        assert pool.available_beside(hits) == 3
        pool.retain(hits)
        fresh = pool.allocate(3)
        assert fresh is not None
        assert pool.allocate(1) is None
        assert found(pool, [2] * 4) == wanted
        assert not set(hits) & set(fresh)
        assert all(found(pool, [token] * 4) == [] for token in (10, 11, 12))

    def test_evictions_come_in_batches_so_that_sequences_grow_in_place(self) -> None:
        pool = BlockPool(64 * EVICT_BATCH_MAX, 4)
        blocks = put(pool, range(4 * pool.block_count))
        pool.release(blocks)
        tail: list[int] = []
        for _ in range(EVICT_BATCH_MAX):
            tail += pool.allocate(1, after=tail[-1] if tail else None) or []
        runs = sum(b != a + 1 for a, b in itertools.pairwise(tail)) + 1
        assert runs <= 4, "one by one, evictions would leave a run for each block"
        assert pool.evicted <= 2 * EVICT_BATCH_MAX

    def test_the_books_agree_whatever_happens(self, rng: random.Random) -> None:
        pool = BlockPool(12, 2)
        held: list[list[int]] = []
        for _ in range(2000):
            tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 5))]
            chain = chain_of(pool, tokens)
            hits = pool.find(chain, rng.randint(0, len(chain.digests)))
            need = len(chain.digests) - len(hits)
            if pool.available_beside(hits) >= need:
                pool.retain(hits)
                fresh = pool.allocate(need)
                assert fresh is not None
                pool.register(chain, [*hits, *fresh])
                held.append([*hits, *fresh])
            while held and rng.random() < 0.5:
                pool.release(held.pop(rng.randrange(len(held))))
            pool.check_integrity(Counter(block for blocks in held for block in blocks))
