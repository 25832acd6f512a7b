"""The kernels that pack row by row, in torch and in Triton, against rows packed by hand.

Without a GPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import raw, rows
from kvtier_kernels.raw import LayerViews
from tests.lib.paged_cases import POISON, Case, cases
from tests.lib.row_oracles import FORMATS, Format, fill, rows_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE_EXAMPLES = 30
#: An example takes the interpreter longer than all of its checks.
TRITON_EXAMPLES = 6
ENGINES = ["reference", "triton"]
DIMS = [64, 80, 96, 128, 192, 256]


class Ops:
    """Pack and unpack by one of a format's engines."""

    def __init__(self, form: Format, engine: str) -> None:
        self.form = form
        self.engine = form.engine() if engine == "triton" else None
        self.device = DEVICE if engine == "triton" else "cpu"

    def pack(self, views: Sequence[LayerViews], span: raw.Span, target: memoryview) -> None:
        if self.engine is None:
            self.form.kernel.pack(views, span, target)
            return
        rows.pack(views, span, target, 0, self.form.kernel.row_bytes, self.engine)

    def unpack(self, source: memoryview, views: Sequence[LayerViews], span: raw.Span) -> None:
        if self.engine is None:
            self.form.kernel.unpack(source, views, span)
            return
        rows.unpack(source, views, span, 0, self.form.kernel.row_bytes, self.engine)

    def section(self, case: Case, views: Sequence[LayerViews]) -> bytearray:
        """A poisoned section into which the case was packed."""
        dims = [case.k_dim, case.v_dim] if case.v_dim else [case.k_dim]
        row_bytes = sum(sum(self.form.kernel.row_bytes(dim)) for dim in dims)
        planes = case.layers * case.span.kv_heads
        section = bytearray([POISON]) * (planes * case.span.tokens * row_bytes)
        self.pack(views, case.span, memoryview(section))
        return section


def as_bytes(values: torch.Tensor) -> bytes:
    return values.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def check(form: Format, engine: str, case: Case) -> None:
    """Pack as by hand; unpack into poison what comes back by hand, and nothing else."""
    ops = Ops(form, engine)
    views = case.views(ops.device)
    fill(views, case.seed, specials=form is FORMATS["lossless"])
    section = ops.section(case, views)
    assert section == form.section(case, views)
    target = case.views(ops.device, poisoned=True)
    ops.unpack(memoryview(section).toreadonly(), target, case.span)
    stored, restored = rows_in_order(case, views), rows_in_order(case, target)
    for (_, row), (_, back) in zip(stored, restored, strict=True):
        if row is not None and back is not None:
            assert as_bytes(back) == as_bytes(form.decode(row.cpu()))
            back.view(torch.uint8).fill_(POISON)
    assert all(
        set(as_bytes(part)) == {POISON} for layer in target for part in layer if part is not None
    )


@st.composite
def cases_of(draw: st.DrawFn, dims: st.SearchStrategy[int]) -> tuple[Format, Case]:
    form = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    return form, draw(cases(dtypes=form.dtypes, dims=dims))


@settings(max_examples=REFERENCE_EXAMPLES)
@given(case=cases_of(st.sampled_from([1, 2, 3, 5, 8, 16, 31])))
def test_b16_the_reference_equals_the_oracle(case: tuple[Format, Case]) -> None:
    check(case[0], "reference", case[1])


@settings(max_examples=TRITON_EXAMPLES)
@given(case=cases_of(st.sampled_from([1, 2, 3, 5, 8, 16, 31])))
def test_b16_triton_equals_the_oracle(case: tuple[Format, Case]) -> None:
    check(case[0], "triton", case[1])


def plain_case(dtype: torch.dtype, k_dim: int, v_dim: int, seed: int = 5) -> Case:
    """Two layers, the second of two heads, tokens 3 .. 10 of 12 in scattered blocks of four."""
    span = raw.Span(12, 3, 8, 2, 1, 1, 2, (4, 0, 3))
    return Case(dtype, 2, 3, k_dim, v_dim, 4, 5, "bth", span, seed)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims_of_real_models(name: str, dim: int, engine: str) -> None:
    form = FORMATS[name]
    dtype = form.dtypes[DIMS.index(dim) % len(form.dtypes)]
    check(form, engine, plain_case(dtype, dim, dim))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_latent_rows(name: str, engine: str) -> None:
    """MLA: one head, 512 + 64 values and no V, in bfloat16."""
    span = raw.Span(4, 1, 3, 1, 0, 1, 0, (2, 1))
    case = Case(torch.bfloat16, 1, 1, 576, 0, 2, 3, "bth", span, 9)
    check(FORMATS[name], engine, case)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_b141_twenty_encodes_are_identical(name: str, engine: str) -> None:
    form = FORMATS[name]
    # The interpreter reduces value by value.
    tokens = 6 if engine == "triton" and DEVICE == "cpu" else 42
    blocks = tuple(range(-(-tokens // 16)))
    span = raw.Span(tokens, 0, tokens, 1, 0, 1, 0, blocks)
    case = Case(form.dtypes[0], 1, 1, 64, 64, 16, 3, "bth", span, 0)
    ops = Ops(form, engine)
    views = case.views(ops.device)
    fill(views, 0)
    assert len({bytes(ops.section(case, views)) for _ in range(20)}) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fp8", "grouped"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_b142_what_is_not_finite_is_refused(name: str, engine: str, value: float) -> None:
    case, ops = plain_case(torch.bfloat16, 8, 8), Ops(FORMATS[name], engine)
    views = case.views(ops.device)
    fill(views, 1)
    v_view = views[1][1]
    assert v_view is not None
    v_view[0, 2, 1, 5] = value
    ops.section(case, views)
    v_view[0, 2, 2, 5] = value
    with pytest.raises(rows.UnrepresentableError, match="NaN or infinity"):
        ops.section(case, views)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_does_not_fit_is_refused(name: str) -> None:
    form = FORMATS[name]
    case = plain_case(torch.bfloat16, 8, 8)
    views = case.views("cpu")
    fill(views, 1)
    ops = Ops(form, "reference")
    section = ops.section(case, views)
    before = [as_bytes(part) for layer in views for part in layer if part is not None]
    other_blocks = replace(case.span, block_ids=(4, 0))
    twice = replace(case.span, block_ids=(4, 0, 4))
    for target, span, message in (
        (section[:-1], case.span, "section has"),
        (section + b"\0", case.span, "section has"),
        (section, other_blocks, "blocks, not 2"),
    ):
        kept = bytes(target)
        with pytest.raises(ValueError, match=message):
            form.kernel.pack(views, span, memoryview(target))
        with pytest.raises(ValueError, match=message):
            form.kernel.unpack(memoryview(target), views, span)
        assert target == kept
    with pytest.raises(ValueError, match="named twice"):
        form.kernel.unpack(memoryview(section), views, twice)
    with pytest.raises(ValueError, match="read-only"):
        form.kernel.pack(views, case.span, memoryview(bytes(section)))
    with pytest.raises(ValueError, match="no layers"):
        form.kernel.pack([], case.span, memoryview(section))
    after = [as_bytes(part) for layer in views for part in layer if part is not None]
    assert after == before


@pytest.mark.parametrize("name", ["fp8", "grouped"])
def test_a_dtype_that_is_no_float_is_refused(name: str) -> None:
    case = plain_case(torch.int16, 8, 8)
    section = memoryview(bytearray(16))
    with pytest.raises(ValueError, match="does not take"):
        FORMATS[name].kernel.pack(case.views("cpu"), case.span, section)
