"""Starting vLLM in its own environment, with prompts of the bundled model's vocabulary."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier_engine.weights.load import model_folder

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".peer" / "vllm" / "bin" / "python"
PROGRAM: Final = ROOT / "tests" / "engines" / "vllm_program.py"
#: Longer than any run here; a hang is what these tests look for.
RUN_S: Final = 480.0
BLOCK_TOKENS: Final = 32
CHUNK_TOKENS: Final = 64
_VOCABULARY: Final = 49_152


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the tenant's salt."""

    tokens: list[int]
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a round of prompts, one item a prompt."""

    seconds: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]


@dataclass(slots=True)
class VllmRun:
    """One process of vLLM and what it is to do; ``options`` None: without a connector."""

    options: dict[str, Any] | None
    engine: dict[str, Any] = field(default_factory=dict)
    zeros: bool = False
    processes: bool = False
    policy: str = "recompute"
    model: Path | None = None
    _rounds: list[dict[str, Any]] = field(default_factory=list)

    def serve(self, prompts: list[Prompt], count: int = 8) -> VllmRun:
        """Have prompts answered greedily, with so many tokens each."""
        asked = [{"tokens": each.tokens, "salt": each.salt} for each in prompts]
        self._rounds.append({"do": "serve", "prompts": asked, "count": count})
        return self

    def forget(self) -> VllmRun:
        """Have vLLM forget its own prefixes, so that they must come from a tier."""
        self._rounds.append({"do": "forget"})
        return self

    def reset(self) -> VllmRun:
        """Have vLLM and the connector forget everything."""
        self._rounds.append({"do": "reset"})
        return self

    def metrics(self) -> VllmRun:
        """Have vLLM's count of preemptions and the connector's metrics read."""
        self._rounds.append({"do": "metrics"})
        return self

    def start(self) -> tuple[int, str, str]:
        """Run it; return the exit status and both outputs. ``TimeoutExpired`` when it hangs."""
        asked = {
            "model": str(self.model or model_folder("smollm2-135m")),
            "options": self.options,
            "engine": {
                "block_size": BLOCK_TOKENS,
                "max_model_len": 1024,
                "max_num_seqs": 4,
                **self.engine,
            },
            "zeros": self.zeros,
            "policy": self.policy,
            "rounds": self._rounds,
        }
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.processes)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [str(PYTHON), str(PROGRAM)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            env=environment,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def rounds(self) -> list[dict[str, Any]]:
        """Run it; return what each round came to. ``AssertionError`` unless it ended well."""
        status, output, errors = self.start()
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert (status, len(lines)) == (0, 1), f"vLLM ended with {status}:\n{errors[-4000:]}"
        found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULT "))
        return found

    def served(self) -> list[Served]:
        """Run it; return its rounds of prompts. ``AssertionError`` where one could not forget."""
        rounds = self.rounds()
        assert all(each.get("done", True) for each in rounds), "vLLM could not forget"
        return [Served(**each) for each in rounds if "tokens" in each]


def prompts(
    rng: random.Random, *, families: int, members: int, shared: int = 200, own: int = 40
) -> list[Prompt]:
    """Return families of prompts whose members share their first tokens."""

    def some(count: int) -> list[int]:
        return [rng.randrange(3, _VOCABULARY) for _ in range(count)]

    return [
        Prompt(first + some(own))
        for first in (some(shared) for _ in range(families))
        for _ in range(members)
    ]


def whole_chunks(tokens: int) -> int:
    """Return the tokens of a prompt that a tier can give: whole chunks, one token left over."""
    return (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
