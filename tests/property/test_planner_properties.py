"""The planner against oracles that are written down as sets, not as arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.planner import (
    chunk_shape,
    load_moves,
    needed_groups,
    shard_writers,
    store_moves,
    usable_chunks,
)
from kvtier.codecs.raw import RawCodec
from kvtier.types import (
    Blocks,
    GroupKind,
    KVGroup,
    KVLayout,
    Move,
    Placement,
    ShardId,
    Slot,
)

CHUNK, BLOCK, CHUNKS = 8, 2, 3
#: (kv_heads, head_groups) where one divides the other.
HEADS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (2, 4), (1, 4), (6, 3), (3, 1)]
STAGES = [(0,), (0, 2), (0, 1, 4)]


@dataclass(frozen=True)
class Case:
    """A layout, its workers and a request's blocks."""

    layout: KVLayout
    workers: tuple[Placement, ...]
    blocks: Blocks
    chunk: int


#: One row of one plane in a pool: worker, group, layer and head of the pool, token.
Cell = tuple[int, int, int, int, int]


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    heads, head_groups = draw(st.sampled_from(HEADS))
    owner = draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    kinds = draw(st.lists(st.sampled_from(GroupKind), min_size=3, max_size=3))
    groups: list[KVGroup] = []
    for index, kind in enumerate(kinds):
        layers = tuple(layer for layer, group in enumerate(owner) if group == index)
        latent, window = kind is GroupKind.LATENT, kind is GroupKind.WINDOW
        if layers:
            kv_heads, v_dim = (1, 0) if latent else (heads, 4)
            tokens = draw(st.integers(1, 30)) if window else 0
            groups.append(KVGroup(kind, layers, kv_heads, 4, v_dim, "float32", tokens))
    return KVLayout(
        tuple(groups),
        chunk_tokens=CHUNK,
        head_groups=head_groups,
        stage_starts=draw(st.sampled_from(STAGES)),
        section_layers=draw(st.integers(1, 3)),
    )


def placements(layout: KVLayout, size: int) -> tuple[Placement, ...]:
    stages = len(layout.stage_starts)
    ranks = [(rank, stage) for stage in range(stages) for rank in range(size)]
    return tuple(Placement(i, rank, size, stage) for i, (rank, stage) in enumerate(ranks))


@st.composite
def cases(draw: st.DrawFn, *, whole: bool) -> Case:
    layout = draw(layouts())
    sizes = [n for n in (1, 2, 3, 4, 6) if not whole or layout.head_groups % n == 0]
    workers = placements(layout, draw(st.sampled_from(sizes)))
    start = 0 if whole else BLOCK * draw(st.integers(0, CHUNKS * CHUNK // BLOCK - 1))
    count = CHUNKS * CHUNK // BLOCK if whole else draw(st.integers(0, 14))
    ids = tuple(
        tuple(draw(st.permutations(range(100 * g, 100 * g + count))))
        for g in range(len(layout.groups))
    )
    return Case(layout, workers, Blocks(start, ids, BLOCK), draw(st.integers(0, CHUNKS - 1)))


def heads_of(kv_heads: int, part: int, parts: int) -> list[int]:
    """Heads of one of so many parts, by asking every head whose it is."""
    if parts >= kv_heads:
        return [part * kv_heads // parts]
    return [
        h for h in range(kv_heads) if kv_heads * part // parts <= h < kv_heads * (part + 1) // parts
    ]


def layers_of(layout: KVLayout, group: int, stage: int) -> list[int]:
    """Model layers of a group in a stage, in order."""
    ends = [*layout.stage_starts[1:], 10**6]
    first, end = layout.stage_starts[stage], ends[stage]
    return [layer for layer in layout.groups[group].layers if first <= layer < end]


def cells(case: Case, move: Move) -> list[tuple[Cell, tuple[int, int, int, int]]]:
    """Each pool row of a move, with what the shard holds for it: group, layer, head, token."""
    layout, blocks = case.layout, case.blocks
    worker = next(each for each in case.workers if each.worker == move.worker)
    group = layout.groups[move.shard.group]
    shard_heads = heads_of(group.kv_heads, move.shard.head_group, layout.head_groups)
    model_layers = layers_of(layout, move.shard.group, move.shard.stage)
    assert move.shard.stage == worker.stage
    assert move.layout.layers == len(model_layers)
    position = {block: i for i, block in enumerate(blocks.block_ids[move.shard.group])}
    found: list[tuple[Cell, tuple[int, int, int, int]]] = []
    sections = range(move.first_section, move.first_section + move.section_count)
    rows = [layer for section in sections for layer in move.layout.section_layer_range(section)]
    assert len(move.block_ids) * BLOCK == move.token_count
    for layer in rows:
        for i in range(move.heads.count):
            for t in range(move.token_count):
                token = (
                    blocks.start_token + position[move.block_ids[t // BLOCK]] * BLOCK + t % BLOCK
                )
                pool_layer, pool_head = move.pool_layer_start + layer, move.heads.pool_start + i
                head = shard_heads[move.heads.shard_start + i]
                cell = (move.worker, move.shard.group, pool_layer, pool_head, token)
                in_shard = case.chunk * CHUNK + move.token_start + t
                found.append((cell, (move.shard.group, model_layers[layer], head, in_shard)))
    return found


def end_of(case: Case) -> int:
    """Where what the blocks cover of the chunk ends."""
    blocks = case.blocks
    covered = blocks.start_token + min(map(len, blocks.block_ids)) * BLOCK
    return min(covered, (case.chunk + 1) * CHUNK)


def wanted(
    case: Case, groups: frozenset[int], *, windows: bool = False
) -> dict[Cell, tuple[int, int, int, int]]:
    """Every pool row that a load has to write, with what belongs there.

    With ``windows`` blocks are left out that lie before those of the chunk's end.
    """
    layout, blocks = case.layout, case.blocks
    first, count = blocks.start_token, min(map(len, blocks.block_ids)) * BLOCK
    chunk_tokens = range(case.chunk * CHUNK, (case.chunk + 1) * CHUNK)
    tokens = [token for token in chunk_tokens if first <= token < first + count]
    return {
        (worker.worker, group, pool_layer, pool_head, token): (group, layer, head, token)
        for worker in case.workers
        for group in groups
        for pool_layer, layer in enumerate(layers_of(layout, group, worker.stage))
        for pool_head, head in enumerate(
            heads_of(layout.groups[group].kv_heads, worker.tp_rank, worker.tp_size)
        )
        for token in tokens
        if not (windows and before_window(layout.groups[group], token, end_of(case)))
    }


def before_window(group: KVGroup, token: int, end: int) -> bool:
    """Whether all of a token's block is further back than the group's window."""
    last = token - token % BLOCK + BLOCK - 1
    return group.kind is GroupKind.WINDOW and last < end - group.window_tokens


def slot(_: ShardId) -> Slot:
    return Slot(0, 1 << 20)


@given(cases(whole=False), st.data())
def test_loads_write_every_needed_row_once_and_nothing_else(
    case: Case, data: st.DataObject
) -> None:
    shape = chunk_shape(case.layout, RawCodec())
    every = range(len(case.layout.groups))
    groups = frozenset(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    cut = {
        shard: data.draw(st.integers(0, layout.sections), label=str(shard))
        for shard, layout in shape.layouts.items()
    }
    parts = [
        {shard: range(cut[shard]) for shard in cut},
        {shard: range(cut[shard], shape.layouts[shard].sections) for shard in cut},
    ]
    if not wanted(case, groups, windows=True):
        return
    moves = [
        move
        for ready in parts
        for move in load_moves(
            case.layout,
            shape,
            case.workers,
            chunk=case.chunk,
            groups=groups,
            end_token=end_of(case),
            blocks=case.blocks,
            slots=slot,
            sections=ready.__getitem__,
        )
    ]
    done = [pair for move in moves for pair in cells(case, move)]
    assert not Counter(cell for cell, _ in done).keys() - wanted(case, groups, windows=True).keys()
    assert max(Counter(cell for cell, _ in done).values(), default=1) == 1
    assert dict(done) == wanted(case, groups, windows=True)


@given(cases(whole=True))
def test_stores_take_every_row_of_every_shard_once(case: Case) -> None:
    shape = chunk_shape(case.layout, RawCodec())
    moves = store_moves(
        case.layout,
        shape,
        shard_writers(case.layout, shape, case.workers),
        chunk=case.chunk,
        blocks=case.blocks,
        slots=slot,
    )
    assert [move.shard for move in moves] == list(shape.layouts)
    pool = wanted(case, frozenset(range(len(case.layout.groups))))
    for move in moves:
        assert move.heads.shard_start == 0
        assert move.heads.count == move.layout.kv_heads
        assert (move.first_section, move.section_count) == (0, move.layout.sections)
        assert all(pool[cell] == held for cell, held in cells(case, move))
    taken = Counter(held for move in moves for _, held in cells(case, move))
    assert taken == Counter(dict.fromkeys(pool.values(), 1))


@given(layouts(), st.data())
def test_the_usable_prefix_is_what_trying_every_length_finds(
    layout: KVLayout, data: st.DataObject
) -> None:
    every = range(len(layout.groups))
    held = st.frozensets(st.sampled_from(every)) | st.just(frozenset(every))
    present = data.draw(st.lists(held, max_size=12))

    def usable(count: int) -> bool:
        end = count * CHUNK
        return all(
            group in present[token // CHUNK]
            for group in every
            for token in range(end)
            if layout.groups[group].kind is not GroupKind.WINDOW
            or token >= end - layout.groups[group].window_tokens
        )

    assert usable_chunks(layout, present) == max(filter(usable, range(len(present) + 1)))


@given(layouts(), st.integers(0, 5), st.integers(1, 48))
def test_needed_groups_are_those_with_a_token_in_reach(
    layout: KVLayout, chunk: int, end_token: int
) -> None:
    tokens = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert needed_groups(layout, chunk, end_token) == {
        index
        for index, group in enumerate(layout.groups)
        if group.kind is not GroupKind.WINDOW
        or any(token >= end_token - group.window_tokens for token in tokens)
    }
