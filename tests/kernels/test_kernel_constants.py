"""What engines hear of our kernels: Triton tells its hooks what it compiles, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lib.interpreted import choose_interpreter

choose_interpreter()

import triton  # noqa: E402

from kvtier_kernels import raw  # noqa: E402
from kvtier_kernels.raw import Span  # noqa: E402
from kvtier_kernels.transfer.stripes import Cut, PoolForm, Shape, Stripe  # noqa: E402
from kvtier_kernels.transfer.triton import launch, launch_section  # noqa: E402
from tests.lib.compile_rotated import TOKENS, stripes  # noqa: E402

CASES = [pytest.param(stripe, id=name) for name, _, stripe in stripes()]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Recorder:
    """A kernel that keeps what it is called with."""

    named: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *_: object, **named: object) -> None:
        self.named = named


@pytest.mark.parametrize("stripe", CASES)
def test_constants_are_values_that_json_has(stripe: Stripe) -> None:
    """vLLM has such a hook, and the first store and load after its start failed."""
    recorder = Recorder()
    table, blocks = torch.zeros(1, 12, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    launch(
        replace(stripe, pack=recorder),
        PoolForm(16, torch.bfloat16, 16),
        Cut(8, 0, 8, 0, TOKENS, 0, 0),
        (table, (16, 16, 16)),
        blocks,
        torch.zeros(1, dtype=torch.int32),
        packs=True,
    )
    # Triton itself writes its dtypes as texts.
    constants = {key: each for key, each in recorder.named.items() if key != "ELEMENT"}
    assert constants.keys() > {"ROWS", "DTYPE"}
    json.dumps(constants)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of what is compiled, as a hook hears of them."""
    heard: list[str] = []

    def hear(**told: Any) -> None:
        heard.append(told["fn"].name)

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = hear
        yield heard


@cuda
def test_a_hook_that_hears_of_kernels_does_not_stop_them(hooked: list[str]) -> None:
    """Compiles anew, for a tile that nothing else has."""
    pool = torch.randn(1, 16, 1, 8, device="cuda").to(torch.bfloat16)
    stripe = raw.stripes(Shape(1, 1, 16, (8,), torch.bfloat16, pool.device))[0]
    odd = replace(stripe, constants={**stripe.constants, "ROWS": 1, "STAGES": 3})
    section = torch.zeros(16 * 8 * 2, dtype=torch.uint8, device="cuda")
    failed = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch_section(odd, [pool], Span(16, 0, 16, 1, 0, 1, 0, (0,)), section, failed, packs=True)
    assert torch.equal(section.view(torch.bfloat16), pool.flatten())
    assert len(hooked) == 1
