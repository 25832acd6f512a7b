"""KV that vLLM has stored with one tensor-parallel degree, read with another, on two GPUs.

A small Llama with random weights and four KV heads, stored in four head groups: one rank writes and
two read, then the other way round, through a directory. Every prompt is asked for alone::

    python bench/engines/degrees.py --vllm-path /tmp/vsite --out rows.jsonl raw int4

Of each pair: the tokens that the reader found in the tier, and its answers beside those that it
gives when it computes everything itself; of equal degrees, what computing in pieces changes alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.engines.cross_engine import whole_chunks
from bench.engines.cross_figures import Answer, compare
from bench.engines.cross_processes import Orders, Place, run_vllm

CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
HEAD_GROUPS: Final = 4
SHARED_TOKENS: Final = 700
LIMIT_S: Final = 150.0


def write_model(folder: Path) -> None:
    """Write a model that says something else for every prompt."""
    hidden, inner, vocabulary = 1024, 2048, 32_000
    query, kv = 8 * 128, 4 * 128
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int, scale: float = 0.04) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).half()

    tensors = {
        "model.embed_tokens.weight": some(vocabulary, hidden, scale=1.0),
        "lm_head.weight": some(vocabulary, hidden, scale=0.06),
        "model.norm.weight": torch.ones(hidden).half(),
    }
    for layer in range(8):
        parts = {
            "self_attn.q_proj": some(query, hidden),
            "self_attn.k_proj": some(kv, hidden),
            "self_attn.v_proj": some(kv, hidden),
            "self_attn.o_proj": some(hidden, query),
            "mlp.gate_proj": some(inner, hidden),
            "mlp.up_proj": some(inner, hidden),
            "mlp.down_proj": some(hidden, inner),
            "input_layernorm": torch.ones(hidden).half(),
            "post_attention_layernorm": torch.ones(hidden).half(),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": each for name, each in parts.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_prompts() -> list[list[int]]:
    """Eight prompts that begin alike."""
    rng = random.Random(3)

    def some(count: int) -> list[int]:
        return [rng.randrange(10, 32_000) for _ in range(count)]

    shared = some(SHARED_TOKENS)
    return [shared + some(rng.randrange(100, 800)) for _ in range(8)]


class Bench:
    """Runs vLLM with either degree over one model and its prompts."""

    def __init__(self, place: Place, work: Path) -> None:
        self._place, self._work = place, work
        self._prompts = make_prompts()
        write_model(work / "model")

    def run(self, codec: str) -> list[dict[str, Any]]:
        """Return a row for each pair of degrees."""
        disk = self._work / f"disk-{codec}"
        (cold_one,) = self._vllm(1, codec, disk, [self._writes("one")])
        two = [self._reads("one"), self._writes("two"), self._reads("two")]
        one_by_two, cold_two, two_by_two = self._vllm(2, codec, disk, two)
        one = [self._reads("two"), self._reads("one")]
        two_by_one, one_by_one = self._vllm(1, codec, disk, one)
        return [
            self._row(codec, writer, reader, cold, answers)
            for writer, reader, cold, answers in (
                (1, 2, cold_two, one_by_two),
                (2, 2, cold_two, two_by_two),
                (2, 1, cold_one, two_by_one),
                (1, 1, cold_one, one_by_one),
            )
        ]

    def _row(
        self, codec: str, writer: int, reader: int, cold: list[Answer], answers: list[Answer]
    ) -> dict[str, Any]:
        found = {
            "codec": codec,
            "writer_degree": writer,
            "reader_degree": reader,
            "hit_tokens": sum(each.tier for each in answers),
            "stored_tokens": sum(map(whole_chunks, self._prompts)),
        }
        return found | compare(cold, answers)

    def _writes(self, writer: str) -> Orders:
        return Orders(writer, self._prompts, 32, reads=False)

    def _reads(self, writer: str) -> Orders:
        return Orders(writer, self._prompts, 32, reads=True)

    def _vllm(
        self, degree: int, codec: str, disk: Path, rounds: list[Orders]
    ) -> list[list[Answer]]:
        engine: dict[str, Any] = {
            "block_size": 16,
            "max_model_len": 2048,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 2 << 30,
            "tensor_parallel_size": degree,
        }
        if degree > 1:
            engine |= {"disable_custom_all_reduce": True, "distributed_executor_backend": "mp"}
        options = {
            "dram": "1GiB",
            "disk": str(disk),
            "codec": codec,
            "head_groups": HEAD_GROUPS,
            "load_deadline_s": 60,
            "pending_deadline_s": 60,
            "gpu_time_worth": 1e6,
        }
        asked = {
            "model": str(self._work / "model"),
            "dtype": "float16",
            "role": "kv_both",
            "engine": engine,
            "options": options,
        }
        return run_vllm(self._place, asked, rounds, self._work / f"{degree}-{codec}.log")


def main() -> None:
    """Measure the codecs that are asked for; a line of JSON for each pair of degrees."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("codecs", nargs="*", default=["raw"])
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-path", default="", help="PYTHONPATH of vLLM")
    parser.add_argument("--out", type=Path, default=Path("degrees.jsonl"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Place(asked.vllm_python, asked.vllm_path, LIMIT_S), Path(work))
        for codec in asked.codecs:
            with asked.out.open("a") as file:
                for row in bench.run(codec):
                    file.write(json.dumps(row) + "\n")
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
