"""Paged attention against plain softmax, and the pool that it reads."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.interfaces import PagedPool
from kvtier.types import GroupKind, KVGroup, KVLayout, Part
from kvtier_engine.attention.paged import attend, plan_attention, write_kv
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.types import RowStep

KV_HEADS, DIM, BLOCK, LAYERS = 2, 8, 4, 2

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def layout(dtype: str = "float32", kind: GroupKind = GroupKind.FULL, v_dim: int = DIM) -> KVLayout:
    window = 8 if kind is GroupKind.WINDOW else 0
    group = KVGroup(kind, tuple(range(LAYERS)), KV_HEADS, DIM, v_dim, dtype, window)
    return KVLayout(groups=(group,), chunk_tokens=16)


def make_pool(blocks: int, device: str = "cpu") -> KVPool:
    block_bytes = LAYERS * 2 * KV_HEADS * BLOCK * DIM * 4
    capacity = blocks * block_bytes
    return KVPool(layout(), block_tokens=BLOCK, capacity_bytes=capacity, device=device)


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """``queries [count, heads, dim]`` are the last of ``keys [tokens, kv_heads, dim]``."""
    count, heads, dim = queries.shape
    tokens = len(keys)
    group = heads // keys.shape[1]
    output = torch.empty(count, heads, dim, dtype=torch.float64)
    for place in range(count):
        visible = tokens - count + place + 1
        for head in range(heads):
            key = keys[:visible, head // group].double()
            scores = key @ queries[place, head].double() / math.sqrt(dim)
            output[place, head] = scores.softmax(0) @ values[:visible, head // group].double()
    return output


class Case:
    """Rows of ``(history, count, scattered)`` in one step, over a pool full of NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int, bool]],
        group: int,
        rng: random.Random,
        device: str = "cpu",
    ) -> None:
        needed = [-(-(history + count) // BLOCK) for history, count, _ in rows]
        self.pool = make_pool(sum(needed) + 3, device)
        for index in range(LAYERS):
            self.pool.layer(index).fill_(float("nan"))
        free = list(range(self.pool.block_count))
        self.steps: list[RowStep] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for index, (history, count, scattered) in enumerate(rows):
            blocks = free[: needed[index]]
            del free[: needed[index]]
            if scattered:
                rng.shuffle(blocks)
            self.steps.append(
                RowStep(index, tuple(range(count)), history, (tuple(blocks),), sample=False)
            )
            self.keys.append(torch.randn(history + count, KV_HEADS, DIM))
            self.values.append(torch.randn(history + count, KV_HEADS, DIM))
        self.queries = [torch.randn(count, KV_HEADS * group, DIM) for _, count, _ in rows]

    def run(self, layer: int) -> list[torch.Tensor]:
        for step, keys, values in zip(self.steps, self.keys, self.values, strict=True):
            for position in range(step.start):
                block, offset = step.block_ids[0][position // BLOCK], position % BLOCK
                for part, source in ((Part.K, keys), (Part.V, values)):
                    view = self.pool.layer_view(0, layer, part)
                    view[block, offset] = source[position]
        plan = plan_attention(self.steps, self.pool)
        new = [
            torch.cat((keys[step.start :], values[step.start :]), dim=1)
            for step, keys, values in zip(self.steps, self.keys, self.values, strict=True)
        ]
        memory = self.pool.layer(layer)
        write_kv(memory, torch.cat(new).to(self.pool.device), plan)
        queries = torch.cat(self.queries).to(self.pool.device)
        output = attend(memory, queries, plan, DIM**-0.5).cpu()
        ends = [part.token_start + part.count for part in plan.rows]
        return [
            output[end - len(step.token_ids) : end]
            for step, end in zip(self.steps, ends, strict=True)
        ]

    def expected(self) -> list[torch.Tensor]:
        return [
            plain_attention(*parts)
            for parts in zip(self.queries, self.keys, self.values, strict=True)
        ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, False)],
        [(0, 7, False)],
        [(0, 8, True)],
        [(11, 1, False)],
        [(11, 1, True)],
        [(5, 6, False)],
        [(8, 9, True)],
        [(3, 2, False), (17, 1, True), (0, 5, False), (4, 1, False), (13, 13, True)],
    ],
    ids=str,
)
def test_attention_equals_plain_softmax(
    rows: list[tuple[int, int, bool]], group: int, rng: random.Random, device: str
) -> None:
    case = Case(rows, group, rng, device)
    for got, expected in zip(case.run(1), case.expected(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_random_steps_equal_plain_softmax(rng: random.Random, scale: int) -> None:
    for _ in range(20 * scale):
        rows = [
            (rng.randrange(40), rng.choice((1, 1, rng.randrange(1, 40))), rng.random() < 0.5)
            for _ in range(rng.randrange(1, 5))
        ]
        case = Case(rows, rng.choice((1, 2, 4)), rng)
        for got, expected in zip(case.run(0), case.expected(), strict=True):
            assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5), rows


def test_large_scores_do_not_break_the_merge(rng: random.Random) -> None:
    # History and chunk whose weights differ by hundreds of orders of magnitude.
    for factor in (60.0, -60.0):
        case = Case([(6, 5, False)], 1, rng)
        case.keys[0][:6] *= factor
        case.queries[0] *= 10.0
        (got,), (expected,) = case.run(0), case.expected()
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_step_writes_its_own_slots_only(rng: random.Random) -> None:
    case = Case([(5, 6, True), (3, 1, False)], 1, rng)
    case.run(0)
    assert torch.isnan(case.pool.layer(1)).all()
    written = ~torch.isnan(case.pool.layer(0)).all(dim=(0, 1, 3))
    assert written.sum() == 11 + 4


def test_rows_that_share_history_read_the_same_blocks() -> None:
    pool = make_pool(4)
    pool.layer(0).normal_()
    rows = [
        RowStep(0, (1,), 8, ((0, 1, 2),), sample=True),
        RowStep(1, (2,), 8, ((0, 1, 3),), sample=True),
    ]
    plan = plan_attention(rows, pool)
    assert plan.slots.tolist() == [8, 12]
    queries = torch.randn(1, KV_HEADS, DIM).expand(2, -1, -1).contiguous()
    pool.layer(0)[:, :, 12] = pool.layer(0)[:, :, 8]
    output = attend(pool.layer(0), queries, plan, 1.0)
    torch.testing.assert_close(output[0], output[1])


def test_consecutive_blocks_are_read_without_a_copy() -> None:
    pool = make_pool(6)
    plan = plan_attention([RowStep(0, (1,), 8, ((2, 3, 4),), sample=True)], pool)
    assert plan.rows[0].blocks is None
    assert plan.rows[0].first_slot == 8
    scattered = plan_attention([RowStep(0, (1,), 8, ((2, 4, 3),), sample=True)], pool)
    assert scattered.rows[0].blocks is not None


def test_blocks_beyond_the_step_are_not_looked_at() -> None:
    pool = make_pool(6)
    plan = plan_attention([RowStep(0, (1,), 3, ((2, 5, 0),), sample=True)], pool)
    assert plan.rows[0].blocks is None
    assert plan.slots.tolist() == [11]


def test_a_table_that_is_too_short_is_a_bug() -> None:
    pool = make_pool(6)
    with pytest.raises(AssertionError, match="1 blocks for 5 tokens"):
        plan_attention([RowStep(0, (1,), 4, ((2,),), sample=True)], pool)
    with pytest.raises(AssertionError, match="no tokens"):
        plan_attention([RowStep(0, (), 4, ((2, 3),), sample=True)], pool)


def test_pool_is_what_codecs_expect() -> None:
    pool = make_pool(5)
    assert isinstance(pool, PagedPool)
    assert (pool.block_count, pool.block_tokens, pool.stream) == (5, BLOCK, 0)
    for part in Part:
        view = pool.layer_view(0, 1, part)
        assert view.shape == (5, BLOCK, KV_HEADS, DIM)
        assert view.stride(-1) == 1
        view[3, 2, 1] = 7.0 + part
    slots = pool.layer(1)
    assert slots.shape == (2, KV_HEADS, 5 * BLOCK, DIM)
    assert (slots[0, 1, 14] == 7.0).all()
    assert (slots[1, 1, 14] == 8.0).all()
    assert slots.count_nonzero() == 2 * DIM


def test_pool_takes_as_many_whole_blocks_as_fit() -> None:
    block_bytes = LAYERS * 2 * KV_HEADS * BLOCK * DIM * 2
    pool = KVPool(layout("bfloat16"), block_tokens=BLOCK, capacity_bytes=4 * block_bytes - 1)
    assert (pool.block_count, pool.bytes_per_block) == (3, block_bytes)
    with pytest.raises(ConfigError, match="below one block"):
        KVPool(layout(), block_tokens=BLOCK, capacity_bytes=block_bytes)


def test_pool_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="divisor of chunk_tokens = 16"):
        KVPool(layout(), block_tokens=3, capacity_bytes=1 << 20)
    with pytest.raises(LayoutError, match="'full'"):
        KVPool(layout(kind=GroupKind.WINDOW), block_tokens=BLOCK, capacity_bytes=1 << 20)
    with pytest.raises(LayoutError, match="differ in width"):
        KVPool(layout(v_dim=4), block_tokens=BLOCK, capacity_bytes=1 << 20)
