"""The bundled engine's model side against a plain transformers loop, on a CPU.

    python bench/e2e/engine_cpu.py [--smoke] [--repetitions 7] [--threads 2]

Both compute SmolLM2-135M-Instruct in float32 on the same threads with the same prompts, in one
process and in turns, so that what else the machine does falls on both. Transformers runs its own
KV cache and ``sdpa``; its requests come one after the other. Nothing is timed before both have
generated the same tokens. Ratios are ours to theirs, per repetition.

Limits are measured in the same run: a decoding step must read all weights once (memory bandwidth),
prefill must multiply every weight with every token (matrix product).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# As in kvtier-serve: threads without work sleep, for both sides of the comparison.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.models.linear import Linear
from kvtier_engine.runner import ModelRunner
from kvtier_engine.types import RowStep, SamplingParams, StepBatch
from kvtier_engine.weights.load import DEFAULT_MODEL, LoadedModel, kv_layout, load_model
from kvtier_engine.weights.load import model_folder as hugging_face_folder

BLOCK_TOKENS = 16
#: A pair of tokens that is closer than this in the reference may swap.
TIE_GAP = 1e-3
GREEDY = SamplingParams(temperature=0.0)
TEXT = (
    "A cache is a promise to remember. It may forget, because memory is small and the world is "
    "large; but what it does remember it must remember well. In 1965, 42 engineers met to decide "
    "how a machine should keep what it had read: near or far, fast or cheap, for one or for all. "
)

Prompt = tuple[int, ...]
Tokens = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """How much work a run does."""

    prefill_tokens: int = 512
    context_tokens: int = 128
    new_tokens: int = 16
    concurrent: int = 16
    repetitions: int = 7


SMOKE = Sizes(prefill_tokens=24, context_tokens=12, new_tokens=3, concurrent=3, repetitions=2)


class Ours:
    """The engine's runner with block tables made by hand: request ``i`` has blocks of its own."""

    def __init__(self, model: LoadedModel, sizes: Sizes) -> None:
        longest = max(sizes.prefill_tokens, sizes.context_tokens + sizes.new_tokens)
        self._blocks = -(-longest // BLOCK_TOKENS) + 1
        layout = kv_layout(model.config, model.dtype)
        token_bytes = 2 * model.config.layer_count * model.config.kv_heads * model.config.head_dim
        capacity = sizes.concurrent * self._blocks * BLOCK_TOKENS * token_bytes * 4
        pool = KVPool(layout, block_tokens=BLOCK_TOKENS, capacity_bytes=capacity)
        self._runner = ModelRunner(model, pool, max_rows=sizes.concurrent)
        self._lengths: list[int] = []

    def start(self, prompts: Sequence[Prompt]) -> Tokens:
        """Prefill each prompt alone; return each one's first token."""
        for row in range(len(self._lengths)):
            self._runner.remove_row(row)
        self._lengths = []
        first = []
        for row, prompt in enumerate(prompts):
            self._runner.add_row(row, prompt, GREEDY)
            self._lengths.append(0)
            first += self._step({row: prompt})
        return [[token] for token in first]

    def decode(self, tokens: Tokens, count: int) -> None:
        """Append ``count`` tokens to every request, all requests in each step."""
        for _ in range(count):
            fed = {row: (generated[-1],) for row, generated in enumerate(tokens)}
            for generated, token in zip(tokens, self._step(fed), strict=True):
                generated.append(token)

    def _step(self, fed: Mapping[int, Prompt]) -> list[int]:
        rows = []
        for row, ids in fed.items():
            blocks = (tuple(range(row * self._blocks, (row + 1) * self._blocks)),)
            rows.append(RowStep(row, ids, self._lengths[row], blocks, sample=True))
            self._lengths[row] += len(ids)
        output = self._runner.step(StepBatch(tuple(rows)))
        return [token.token_id for token in output.sampled if token is not None]


class Transformers:
    """A plain loop: one request after the other, each with transformers' own KV cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: list[Any] = []

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt]) -> Tokens:
        """Prefill each prompt; return each one's first token."""
        self._caches = []
        first = []
        for prompt in prompts:
            output = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            self._caches.append(output.past_key_values)
            first.append([int(output.logits[0, -1].argmax())])
        return first

    @torch.inference_mode()
    def decode(self, tokens: Tokens, count: int) -> None:
        """Append ``count`` tokens to every request, request by request."""
        for generated, cache in zip(tokens, self._caches, strict=True):
            for _ in range(count):
                output = self._model(torch.tensor([generated[-1:]]), cache=cache, use_cache=True)
                generated.append(int(output.logits[0, -1].argmax()))

    @torch.inference_mode()
    def gap(self, prompt: Prompt, generated: list[int], other: int) -> float:
        """Return how far the next token after ``generated`` is ahead of ``other``."""
        logits = self._model(torch.tensor([[*prompt, *generated]]), logits_to_keep=1).logits[0, -1]
        return float(logits.max() - logits[other])


def prompts_of(model: LoadedModel, tokens: int, count: int) -> list[Prompt]:
    """Return prompts that differ from their first token on."""
    ids = model.tokenizer.encode(TEXT * (1 + (tokens + 7 * count) // 60))
    return [tuple(ids[7 * start : 7 * start + tokens]) for start in range(count)]


def gate(ours: Ours, theirs: Transformers, prompts: Sequence[Prompt], count: int) -> None:
    """Stop with an error unless both generate the same tokens, true ties aside."""
    results = []
    for side in (ours, theirs):
        tokens = side.start(prompts)
        side.decode(tokens, count)
        results.append(tokens)
    for prompt, mine, reference in zip(prompts, *results, strict=True):
        same = 0
        while same < len(mine) and mine[same] == reference[same]:
            same += 1
        if same < len(mine) and theirs.gap(prompt, reference[:same], mine[same]) >= TIE_GAP:
            raise SystemExit(f"tokens differ: {mine} and {reference}; nothing was timed")


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(
    ours: Ours, theirs: Transformers, model: LoadedModel, sizes: Sizes
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second by figure and side, one value per repetition."""
    long = prompts_of(model, sizes.prefill_tokens, 1)
    many = prompts_of(model, sizes.context_tokens, sizes.concurrent)
    names = ("prefill", "decode_1", f"decode_{sizes.concurrent}")
    rates: dict[str, dict[str, list[float]]] = {name: {"ours": [], "theirs": []} for name in names}
    for repetition in range(sizes.repetitions):
        sides: list[tuple[str, Ours | Transformers]] = [("ours", ours), ("theirs", theirs)]
        # Who goes first changes, and the parts are short: neighbours disturb both alike.
        for name, prompts in ((names[0], long), (names[1], many[:1]), (names[2], many)):
            for side_name, side in sides if repetition % 2 else reversed(sides):
                if name == "prefill":
                    rate = len(long[0]) / seconds(partial(side.start, long))
                else:
                    tokens = side.start(prompts)
                    taken = seconds(partial(side.decode, tokens, sizes.new_tokens))
                    rate = len(prompts) * sizes.new_tokens / taken
                rates[name][side_name].append(rate)
    return rates


def limits(model: LoadedModel, sizes: Sizes) -> dict[str, float]:
    """Return what this machine allows, tokens per second: the best of a few tries."""
    config = model.config
    attention = (2 * config.head_count + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    weights = config.layer_count * layer + head
    memory = torch.ones(weights // 2)
    read_s = min(seconds(memory.sum) for _ in range(5)) * 2
    inputs, product = torch.ones(sizes.prefill_tokens, 2048), Linear(torch.ones(2048, 2048))
    product_s = min(seconds(lambda: product(inputs)) for _ in range(5))
    per_token = product_s / sizes.prefill_tokens * config.layer_count * layer / 2048**2
    return {"prefill": 1 / per_token, "decode_1": 1 / read_s}


def run(model: LoadedModel, reference: Any, sizes: Sizes) -> dict[str, Any]:
    """Check, measure, and return the figures of a row."""
    ours, theirs = Ours(model, sizes), Transformers(reference)
    gate(ours, theirs, prompts_of(model, sizes.context_tokens, sizes.concurrent), sizes.new_tokens)
    gate(ours, theirs, prompts_of(model, sizes.prefill_tokens, 1), 0)
    rates = measure(ours, theirs, model, sizes)
    bound = limits(model, sizes)
    figures: dict[str, Any] = {}
    for name, sides in rates.items():
        ratios = [a / b for a, b in zip(sides["ours"], sides["theirs"], strict=True)]
        figures[name] = {
            "ours_tokens_per_s": spread(sides["ours"]),
            "transformers_tokens_per_s": spread(sides["theirs"]),
            "ratio": spread(ratios),
        }
        if name in bound:
            figures[name]["limit_tokens_per_s"] = bound[name]
            figures[name]["share_of_limit"] = spread(sides["ours"])["p50"] / bound[name]
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print one line per figure: tokens per second of both, and their ratio."""
    for name, figure in figures.items():
        parts = [f"{name:10}"]
        for key in ("ours_tokens_per_s", "transformers_tokens_per_s", "ratio"):
            low, middle, high = figure[key].values()
            parts.append(f"{key} p20 {low:.2f} p50 {middle:.2f} p80 {high:.2f}")
        if "share_of_limit" in figure:
            parts.append(f"share of limit {figure['share_of_limit']:.0%}")
        print("  ".join(parts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; only a full run is recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--smoke", action="store_true", help="a few tokens, no row")
    parser.add_argument("--repetitions", type=int, default=Sizes().repetitions)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    from transformers import LlamaForCausalLM

    torch.set_num_threads(options.threads)
    model = load_model(DEFAULT_MODEL)
    reference = LlamaForCausalLM.from_pretrained(
        hugging_face_folder(DEFAULT_MODEL), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    sizes = SMOKE if options.smoke else Sizes(repetitions=options.repetitions)
    figures = run(model, reference, sizes)
    show(figures)
    if not options.smoke:
        row = {"model": DEFAULT_MODEL, "threads": options.threads, "sizes": vars(sizes)}
        write_row("engine_cpu", row | figures, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
