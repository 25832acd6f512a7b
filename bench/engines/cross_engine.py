"""KV that one engine has stored, read by another: vLLM and kvtier-serve, writer by reader by codec.

Both serve one folder with the bundled model's weights and share a directory, or a cache server, one
engine at a time. Every prompt is asked for alone and greedily::

    python bench/engines/cross_engine.py --vllm-python .peer/vllm/bin/python --out rows.jsonl
    python bench/engines/cross_engine.py --device cuda --dtype bfloat16 \\
        --vllm-path /tmp/vsite --serve-path /tmp/site --out rows.jsonl
    python bench/engines/cross_engine.py --table rows.jsonl

Of each cell: the tokens that the reader found in a tier, and its answers beside those that it gives
when it computes everything itself: tokens up to the first difference, and the KL divergence of the
distributions of the next token (a lower bound, from the 20 likeliest). The control, a reader with
another ``weights_id``, must find nothing. Where one engine is writer and reader with ``raw``, one
sees what computing in other pieces changes by itself.

A line of JSON is written as soon as its cell is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.engines.cross_figures import Answer, compare, table
from bench.engines.cross_processes import (
    Orders,
    Place,
    ProcessError,
    run_serve,
    run_vllm,
    running_daemon,
)
from kvtier.constants import GIB
from kvtier_engine.quality.text import read_text
from kvtier_engine.tokenizer import load_tokenizer
from kvtier_engine.weights.load import DEFAULT_MODEL, model_folder

CHUNK_TOKENS: Final = 256
CONTEXT_TOKENS: Final = 2048
SERVE: Final = "kvtier-serve"
VLLM: Final = "vllm"
#: Of a prompt what the members of its family share, and what is its own, from and to.
SHARED_TOKENS: Final = (240, 1000)
OWN_TOKENS: Final = (60, 500)
MEMBERS: Final = 4
RESULTS: Final = Path(__file__).parents[1] / "results" / "cross_engine.jsonl"


@dataclass(frozen=True, slots=True)
class Case:
    """A codec, and the size of each engine's blocks."""

    codec: str
    vllm_block: int
    serve_block: int

    @classmethod
    def read(cls, text: str) -> Case:
        """Read ``CODEC:VLLM_BLOCK:SERVE_BLOCK``."""
        codec, vllm_block, serve_block = text.split(":")
        return cls(codec, int(vllm_block), int(serve_block))

    def block(self, engine: str) -> int:
        """Return the size of an engine's blocks."""
        return self.vllm_block if engine == VLLM else self.serve_block


@dataclass(frozen=True, slots=True)
class Store:
    """What both engines share: a directory, or a cache server behind a URL."""

    folder: Path
    url: str

    def tier(self) -> tuple[str, str]:
        """Return the option for it, which has one name in both engines, and its value."""
        return ("remote", self.url) if self.url else ("disk", str(self.folder))


class Bench:
    """Runs cases and says what came of each cell."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self._asked = asked
        self._work = work
        self._model = asked.model or model_folder(DEFAULT_MODEL)
        self._serve = Place(asked.serve_python, asked.serve_path, asked.limit_s)
        self._vllm = Place(asked.vllm_python, asked.vllm_path, asked.limit_s)
        self._prompts = make_prompts(self._model, asked.prompts, asked.scale)
        self._runs = itertools.count(1)
        self._began = time.monotonic()

    def run(self, case: Case, *, control: bool) -> None:
        """Run all cells of a case. Who reads what others wrote does so before it writes itself."""
        serve, vllm = SERVE in self._asked.engines, VLLM in self._asked.engines
        cold: dict[str, list[Answer]] = {}
        with self._store(case) as store:
            if serve:
                (cold[SERVE],) = self._rounds(SERVE, case, store, [self._writes(SERVE)])
            if vllm:
                writers = [SERVE] if serve else []
                orders = [self._reads(each) for each in writers]
                orders += [self._writes(VLLM), self._reads(VLLM)]
                *others, cold[VLLM], own = self._rounds(VLLM, case, store, orders)
                for writer, answers in zip([*writers, VLLM], [*others, own], strict=True):
                    self._tell(case, writer, VLLM, cold[VLLM], answers)
            if serve:
                writers = [SERVE, VLLM] if vllm else [SERVE]
                rounds = self._rounds(SERVE, case, store, [self._reads(each) for each in writers])
                for writer, answers in zip(writers, rounds, strict=True):
                    self._tell(case, writer, SERVE, cold[SERVE], answers)
            if control:
                for reader in cold:
                    writer = next((each for each in cold if each != reader), reader)
                    orders = [self._reads(writer, 1)]
                    (answers,) = self._rounds(reader, case, store, orders, weights_id="others")
                    self._tell(case, writer, reader, [], answers)

    def _writes(self, engine: str) -> Orders:
        return Orders(engine, self._prompts, self._asked.count, reads=False)

    def _reads(self, writer: str, count: int = 0) -> Orders:
        return Orders(writer, self._prompts, count or self._asked.count, reads=True)

    @contextmanager
    def _store(self, case: Case) -> Iterator[Store]:
        """Open what engines share in one case, and in no other."""
        folder = Path(tempfile.mkdtemp(prefix=f"{case.codec}-", dir=self._work))
        if self._asked.through == "disk":
            yield Store(folder / "disk", "")
            return
        log = self._work / f"daemon-{folder.name}.log"
        with running_daemon(self._serve, folder / "socket", log) as url:
            yield Store(folder, url)

    def _rounds(
        self, engine: str, case: Case, store: Store, rounds: list[Orders], weights_id: str = ""
    ) -> list[list[Answer]]:
        log = self._work / f"{next(self._runs):02}-{engine}-{case.codec}.log"
        began = time.monotonic()
        name, value = store.tier()
        if engine == VLLM:
            found = run_vllm(
                self._vllm, self._vllm_asked(case, name, value, weights_id), rounds, log
            )
        else:
            options = self._serve_options(case, name, value, weights_id)
            found = run_serve(self._serve, options, rounds, self._model, log)
        say(f"{engine} {case}: {len(rounds)} rounds in {time.monotonic() - began:.0f} s")
        return found

    def _vllm_asked(self, case: Case, tier: str, value: str, weights_id: str) -> dict[str, Any]:
        engine: dict[str, Any] = {"block_size": case.vllm_block, "max_model_len": CONTEXT_TOKENS}
        if self._asked.device == "cuda":
            # Nothing is measured that others on the GPU could change meanwhile.
            engine |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 * GIB}
        options = {
            "dram": "1GiB",
            "codec": case.codec,
            "chunk_tokens": CHUNK_TOKENS,
            "load_deadline_s": 60,
            "pending_deadline_s": 60,
            "gpu_time_worth": 1e6,
            tier: value,
            **self._asked.vllm_options,
        }
        if weights_id:
            options["weights_id"] = weights_id
        return {
            "model": str(self._model),
            "dtype": self._asked.dtype,
            # A control that stored something would find it.
            "role": "kv_consumer" if weights_id else "kv_both",
            "engine": engine,
            "options": options,
        }

    def _serve_options(self, case: Case, tier: str, value: str, weights_id: str) -> list[str]:
        asked = self._asked
        sizes = {"block-tokens": case.serve_block, "chunk-tokens": CHUNK_TOKENS, "dram": "1GiB"}
        options = sizes | {
            "device": asked.device,
            "dtype": asked.dtype,
            "max-model-len": CONTEXT_TOKENS,
            "kv-bytes": asked.kv_bytes,
            "codec": case.codec,
            "gpu-time-worth": 1_000_000,
            tier: value,
        }
        if weights_id:
            options["weights-id"] = weights_id
        return [f"--{name}={each}" for name, each in options.items()]

    def _tell(
        self, case: Case, writer: str, reader: str, cold: list[Answer], answers: list[Answer]
    ) -> None:
        """Write a cell's row; one without cold answers is a control."""
        row: dict[str, Any] = {
            "codec": case.codec,
            "writer": writer,
            "reader": reader,
            "writer_block": case.block(writer),
            "reader_block": case.block(reader),
            "control": not cold,
            "device": self._asked.device,
            "dtype": self._asked.dtype,
            "through": self._asked.through,
            "prompts": len(answers),
            "prompt_tokens": sum(map(len, self._prompts)),
            "stored_tokens": sum(map(whole_chunks, self._prompts)),
            "hit_tokens": sum(each.tier for each in answers),
            "found_tokens": sum(each.found for each in answers),
            "count": len(answers[0].tokens),
            "at_s": round(time.monotonic() - self._began, 1),
        }
        row |= compare(cold, answers) if cold else {}
        with self._asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(json.dumps(row))


def make_prompts(model: Path, count: int, scale: float) -> list[list[int]]:
    """Return prompts out of a book: families whose members have their first tokens in common."""
    _, text = read_text(None)
    book = load_tokenizer(model).encode(text, add_special_tokens=False)
    rng = random.Random(26)

    def some(lengths: tuple[int, int]) -> list[int]:
        length = max(2, int(rng.randint(*lengths) * scale))
        start = rng.randrange(len(book) - length)
        return list(book[start : start + length])

    prompts: list[list[int]] = []
    while len(prompts) < count:
        shared = some(SHARED_TOKENS)
        prompts += [shared + some(OWN_TOKENS) for _ in range(MEMBERS)]
    return prompts[:count]


def whole_chunks(prompt: list[int]) -> int:
    """Return the tokens of a prompt that are stored. Its last one is computed all the same."""
    return len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS


def read_cells(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the cells in files: a line each, or several in a row of the results."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [cell for row in rows for cell in row.get("cells", [row])]


def say(text: str) -> None:
    """Tell whoever watches."""
    print(text, file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, nargs="*", help="print cells of files (the results)")
    parser.add_argument("--cases", nargs="+", default=["raw:32:16"], help="CODEC:VLLM:SERVE blocks")
    parser.add_argument("--engines", nargs="+", choices=[SERVE, VLLM], default=[SERVE, VLLM])
    parser.add_argument("--control", action="store_true", help="with a control in the first case")
    parser.add_argument("--through", choices=["disk", "daemon"], default="disk")
    parser.add_argument("--model", type=Path, help="a folder (the bundled model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--count", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts' lengths")
    parser.add_argument("--kv-bytes", default="2GiB", help="HBM of kvtier-serve")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--limit-s", type=float, default=240, help="of one process")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-path", default="", help="PYTHONPATH of vLLM")
    parser.add_argument("--vllm-options", type=json.loads, default={}, help="more, as JSON")
    parser.add_argument("--serve-python", default=sys.executable)
    parser.add_argument("--serve-path", default="", help="PYTHONPATH of kvtier-serve")
    parser.add_argument("--out", type=Path, default=Path("cross_engine.jsonl"))
    parser.add_argument("--logs", type=Path, help="where processes' logs stay")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; a case that fails does not end the others."""
    asked = read_arguments()
    if asked.table is not None:
        print(table(read_cells(asked.table or [RESULTS])))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.logs or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(asked, work)

        def run(index: int) -> bool:
            text = asked.cases[index]
            try:
                bench.run(Case.read(text), control=asked.control and not index)
            except (ProcessError, OSError) as error:
                say(f"{text}: {error}")
                return False
            return True

        with ThreadPoolExecutor(asked.jobs) as threads:
            return int(not all(list(threads.map(run, range(len(asked.cases))))))


if __name__ == "__main__":
    sys.exit(main())
