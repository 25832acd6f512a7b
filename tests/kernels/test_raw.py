"""The raw op against a row-by-row oracle, and its checks at the door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from kvtier_kernels import raw
from tests.lib.paged_cases import ORDERS, POISON, Case, cases

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


def row_bytes(row: torch.Tensor) -> bytes:
    return row.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def expected_section(case: Case, views: Sequence[raw.LayerViews]) -> bytes:
    """Row by row: where each one lies in the pool and where it belongs in the section."""
    section, span = bytearray([POISON]) * case.section_bytes, case.span
    position = 0
    for layer in views:
        for head in range(span.kv_heads):
            for part in layer:
                if part is None:
                    continue
                size = part.shape[3] * case.dtype.itemsize
                for token in range(span.tokens):
                    moved = span.token_start <= token < span.token_start + span.token_count
                    moved &= span.head_start <= head < span.head_start + span.head_count
                    if moved:
                        nth = token // case.block_tokens - span.token_start // case.block_tokens
                        pool_head = head - span.head_start + span.pool_head_start
                        row = part[span.block_ids[nth], token % case.block_tokens, pool_head]
                        section[position : position + size] = row_bytes(row)
                    position += size
    assert position == len(section)
    return bytes(section)


def pool_bytes(views: Sequence[raw.LayerViews]) -> list[bytes]:
    return [row_bytes(part) for layer in views for part in layer if part is not None]


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases())
def test_pack_equals_the_oracle(device: str, case: Case) -> None:
    views = case.views(device)
    section = bytearray([POISON]) * case.section_bytes
    raw.pack(views, case.span, memoryview(section))
    assert section == expected_section(case, views)


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases())
def test_b16_unpack_is_the_inverse_and_touches_nothing_else(device: str, case: Case) -> None:
    """Into a poisoned pool, and the same rows then taken out by the oracle are the section's."""
    views, target = case.views(device), case.views(device, poisoned=True)
    section = expected_section(case, views)
    raw.unpack(memoryview(section), target, case.span)
    assert expected_section(case, target) == section
    poison = bytearray([POISON]) * case.section_bytes
    raw.unpack(memoryview(poison), target, case.span)
    assert all(set(part) == {POISON} for part in pool_bytes(target))


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks_scattered_and_in_runs(device: str) -> None:
    """Runs long and short, with a part block at each end, give what the oracle gives."""
    span = raw.Span(256, 3, 250, 3, 1, 2, 0, ())
    runs = [*range(40, 56)], [*range(40, 48), *range(10, 18)], [*range(0, 48, 3)]
    for blocks in runs:
        case = Case(
            torch.float32, 2, 3, 8, 8, 16, 64, "hbt", replace(span, block_ids=tuple(blocks)), 7
        )
        views = case.views(device)
        section = bytearray([POISON]) * case.section_bytes
        raw.pack(views, case.span, memoryview(section))
        assert section == expected_section(case, views)


def plain_span(tokens: int) -> raw.Span:
    """All rows of one head, in blocks of 16 from the first on."""
    return raw.Span(tokens, 0, tokens, 1, 0, 1, 0, tuple(range(tokens // 16)))


PLAIN = Case(torch.float32, 1, 1, 4, 4, 16, 8, "bth", plain_span(64), 3)


def test_layers_checked_once_move_as_those_checked_by_every_call() -> None:
    case = replace(PLAIN, layers=3, k_dim=64, v_dim=64)
    views = case.views("cpu")
    layers = raw.PoolLayers(views)
    section = bytearray(case.section_bytes)
    raw.pack(layers, case.span, memoryview(section))
    assert section == expected_section(case, views)
    views[0][0].fill_(1)
    raw.pack(layers, case.span, memoryview(section))
    assert section == expected_section(case, views)
    with pytest.raises(ValueError, match="4 blocks, not 1"):
        raw.pack(layers, replace(case.span, block_ids=(0,)), memoryview(section))
    with pytest.raises(ValueError, match="some layers have a V"):
        raw.PoolLayers([views[0], (views[1][0], None)])


@pytest.mark.parametrize("gap", [0, 1, 64, 96, 4096], ids="gap{}".format)
@pytest.mark.parametrize("order", ORDERS)
def test_b16_layers_on_both_sides_of_their_section(order: str, gap: int) -> None:
    """The section lies between two layers in one memory, at distances odd and even."""
    span = raw.Span(64, 0, 64, 2, 0, 2, 0, (5, 2, 3, 7))
    case = Case(torch.uint8, 2, 2, 64, 64, 16, 8, order, span, 9)
    plane = case.block_count * case.block_tokens * case.pool_heads * 64
    memory = torch.full((2 * plane * 2 + 2 * gap + case.section_bytes,), POISON, dtype=torch.uint8)
    start = 2 * plane + gap
    section = memory[start : start + case.section_bytes].numpy().data
    views = []
    for layer, at in zip(case.views("cpu"), (0, start + case.section_bytes + gap), strict=True):
        parts = []
        for nth, part in enumerate(layer):
            assert part is not None
            view = memory[at + nth * plane :].as_strided(part.shape, part.stride())
            parts.append(view.copy_(part))
        views.append((parts[0], parts[1]))
    raw.pack(views, span, section)
    expected = expected_section(case, views)
    assert section == expected
    before = memory.clone()
    raw.unpack(section, views, span)
    assert torch.equal(memory, before)
    for layer in views:
        for part in layer:
            part.fill_(0)
    raw.unpack(section, views, span)
    assert expected_section(case, views) == expected
    assert section == expected
    gaps = [memory[2 * plane : start], memory[start + case.section_bytes :][:gap]]
    assert all(set(between.tolist()) <= {POISON} for between in gaps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_b01_runs_behind_what_the_pools_stream_still_writes() -> None:
    """Blocks are written on a stream of their own; pack on it sees the write, unpack is done."""
    case = Case(torch.float32, 1, 1, 64, 64, 16, 4096, "hbt", plain_span(4096), 1)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ((k_view, v_view),) = case.views("cuda")
    assert v_view is not None
    for nth in range(20):
        with torch.cuda.stream(stream):
            for _ in range(20):
                k_view.normal_()
            k_view.fill_(float(nth))
            v_view.fill_(float(-nth))
        section = bytearray(case.section_bytes)
        raw.pack([(k_view, v_view)], case.span, memoryview(section), stream.cuda_stream)
        halves = torch.frombuffer(section, dtype=torch.float32).view(2, -1)
        assert torch.equal(halves[0], torch.full_like(halves[0], nth))
        assert torch.equal(halves[1], torch.full_like(halves[1], -nth))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_ids": (0, 1, 2)}, "4 blocks, not 3"),
        ({"block_ids": (0, 1, 2, 3, 4)}, "4 blocks, not 5"),
        ({"block_ids": (0, 1, 2, 8)}, "outside 0 .. 7"),
        ({"block_ids": (0, 1, 2, -1)}, "outside 0 .. 7"),
        ({"token_start": 1}, "rows lie outside"),
        ({"token_count": 0}, "rows lie outside"),
        ({"token_start": -16, "token_count": 16, "block_ids": (0,)}, "rows lie outside"),
        ({"head_count": 0}, "heads lie outside"),
        ({"head_start": 1}, "heads lie outside"),
        ({"pool_head_start": 1}, "pool has 1 heads"),
        ({"pool_head_start": -1}, "pool has 1 heads"),
        ({"kv_heads": 2}, "section has 4096 bytes, not 2048"),
    ],
    ids=str,
)
def test_a_span_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    span = replace(PLAIN.span, **changes)  # type: ignore[arg-type]
    views, section = PLAIN.views("cpu"), bytearray(PLAIN.section_bytes)
    before = pool_bytes(views)
    with pytest.raises(ValueError, match=message):
        raw.pack(views, span, memoryview(section))
    with pytest.raises(ValueError, match=message):
        raw.unpack(memoryview(section), views, span)
    assert pool_bytes(views) == before
    assert not any(section)


def test_views_that_differ_are_refused() -> None:
    ((k_view, v_view),) = PLAIN.views("cpu")
    assert v_view is not None
    section = memoryview(bytearray(PLAIN.section_bytes))
    bad: list[tuple[list[raw.LayerViews], str]] = [
        ([], "no layers"),
        ([(k_view, v_view[:4])], "differ in shape"),
        ([(k_view, v_view.to(torch.bfloat16))], "dtype or device"),
        ([(k_view, v_view.transpose(1, 3))], "differ in shape"),
        ([(k_view[..., :0], v_view)], "without values"),
    ]
    for layers, message in bad:
        with pytest.raises(ValueError, match=message):
            raw.pack(layers, PLAIN.span, section)


def test_rows_that_a_gpus_kernels_cannot_move_are_refused() -> None:
    apart = [
        (view.to("meta"), view.to("meta").repeat_interleave(2, 3)[..., ::2])
        for view, _ in PLAIN.views("cpu")
    ]
    with pytest.raises(ValueError, match="not dense"):
        raw.check_span(apart, PLAIN.span)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("blocks", [(6, 2, 5, 0), (2, 3, 4, 5)])
def test_rows_whose_values_lie_apart(first: int, blocks: tuple[int, ...]) -> None:
    """On a CPU an engine may keep K with a block's tokens innermost."""
    dense = [(torch.randn(8, 16, 3, 8), torch.randn(8, 16, 3, 8)) for _ in range(2)]
    apart = [(k.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), v.clone()) for k, v in dense]
    assert apart[0][0].stride(3) == 16
    span = replace(plain_span(64), kv_heads=3, head_count=3, block_ids=blocks)
    span = replace(span, token_start=first, token_count=64 - first)
    sections = [memoryview(bytearray(2 * 3 * 64 * 16 * 4)) for _ in range(2)]
    for layers, section in zip((dense, apart), sections, strict=True):
        raw.pack(layers, span, section)
    assert sections[0] == sections[1]
    for layers in (dense, apart):
        for views in layers:
            for view in views:
                view.zero_()
        raw.unpack(sections[0], layers, span)
    for ours, theirs in zip(dense, apart, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert ours[0].any()


@pytest.mark.parametrize("nbytes", [0, PLAIN.section_bytes - 1, PLAIN.section_bytes + 1])
def test_a_section_of_another_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="section has 2048 bytes"):
        raw.pack(PLAIN.views("cpu"), PLAIN.span, memoryview(bytearray(nbytes)))


def test_pack_refuses_a_read_only_target_and_unpack_takes_one() -> None:
    views = PLAIN.views("cpu")
    section = memoryview(bytes(PLAIN.section_bytes))
    with pytest.raises(ValueError, match="read-only"):
        raw.pack(views, PLAIN.span, section)
    raw.unpack(section, views, PLAIN.span)
    assert not any(pool_bytes(views)[0][: 64 * 16])


def test_unpack_refuses_to_write_one_block_twice() -> None:
    span = replace(PLAIN.span, block_ids=(0, 1, 1, 2))
    with pytest.raises(ValueError, match="named twice"):
        raw.unpack(memoryview(bytearray(PLAIN.section_bytes)), PLAIN.views("cpu"), span)
